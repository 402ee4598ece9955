#!/usr/bin/env bash
# Several machines under torchrun: the same line on each of them. HEAD is the address of any one of the machines, with a free port.
#
#   NODES=4 HEAD=node0:29500 launch/torchrun-multi.sh run=b32 model=vit-b32 batch=64k data.train='/data/laion/{00000..41455}.tar'
#
# PROCS=N workers a machine (one per GPU), JOB=NAME tells jobs with the same HEAD apart, RESTARTS=N starts again after failures:
# with resume=auto from the newest checkpoint. The run folder must lie on storage that all machines share.
set -euo pipefail
: "${NODES:?set NODES to the number of machines}" "${HEAD:?set HEAD=ADDRESS:PORT, one of the machines}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"  # seconds to end the step and save
exec torchrun --nnodes "$NODES" --nproc-per-node "${PROCS:-gpu}" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${JOB:-clipscale}" -m clipscale train "$@"
