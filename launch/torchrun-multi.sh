#!/usr/bin/env bash
# Several machines under torchrun: run the same line on each. HEAD is the address of one of them, with a free port.
#
#   NODES=4 HEAD=node0:29500 launch/torchrun-multi.sh run=b32 model=vit-b32 batch=64k data.train='/data/laion/{00000..41455}.tar'
#
# PROCS=N: workers on each machine (default: one per GPU). JOB=NAME: distinguishes jobs with the same HEAD. RESTARTS=N: restarts after
# failures, with resume=auto from the newest checkpoint. The run folder must be on storage that all machines share.
set -euo pipefail
: "${NODES:?set NODES to the number of machines}" "${HEAD:?set HEAD=ADDRESS:PORT, one of the machines}"
exec python -m clipscale.launch.torchrun --nnodes "$NODES" --nproc-per-node "${PROCS:-gpu}" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${JOB:-clipscale}" -m clipscale train "$@"
