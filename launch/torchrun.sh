#!/usr/bin/env bash
# torchrun on one machine, or the same line on each of several. Arguments go to `clipscale train`:
#
#   launch/torchrun.sh run=l14 model=vit-l14 batch=64k data.train='/data/laion/{00000..41455}.tar'
#   clipscale plan model=vit-l14 batch=64k hardware=h100-80g gpus=8 nodes=4
#   NODES=4 HEAD=node0:29500 launch/torchrun.sh run=l14 ...
#
# `plan` says beforehand whether it fits. HEAD is one of the machines, with a free port. Give the run a name, on storage that
# all machines share. After a failure torchrun starts all workers again, RESTARTS times at most; they resume from the newest
# checkpoint. NODES=2:4 goes on with two to four machines, where these share the batch evenly.
# PROCS: workers on each machine (default: one per GPU). `clipscale train` alone does for one machine without restarts.
set -euo pipefail
clipscale train "$@" --check # a mistake ends here; torchrun would try it again
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE:-120} # seconds from SIGTERM to SIGKILL, for a save (torch 2.11 always gives 30)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a store for each start; torch tells the shared one's address to no machine that joins later
meet=(--standalone)
[ "${NODES:-1}" = 1 ] || meet=(--rdzv-backend=c10d --rdzv-endpoint="${HEAD:?set HEAD=ADDRESS:PORT}" --rdzv-id="${JOB:-clipscale}")
# Where GPUs are near different cores and memory, each worker stays on those near its own; torch wants numactl for it.
near=$(cat /sys/bus/pci/drivers/nvidia/*/numa_node 2>/dev/null | sort -u) || true
bind=()
if [ -z "${PROCS:-}" ] && [[ $near = *$'\n'* && $near != *-1* ]] && command -v numactl >/dev/null; then
    bind=(--numa-binding=node)
fi
exec torchrun --nnodes="${NODES:-1}" --nproc-per-node="${PROCS:-gpu}" --max-restarts="${RESTARTS:-3}" "${meet[@]}" "${bind[@]}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m clipscale train "$@"
