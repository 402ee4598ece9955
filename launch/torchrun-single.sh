#!/usr/bin/env bash
# One machine under torchrun, one worker per GPU. PROCS=N sets another number, also on a machine without GPUs.
#
#   launch/torchrun-single.sh model=vit-l14 batch=64k data.train='/data/laion/{00000..41455}.tar'
#
# `clipscale train` alone does the same. Use this script for torchrun's own options, such as RESTARTS=N.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"  # seconds to end the step and save
# The workers meet in a folder that only this user can read, and listen on loopback alone: a port would obey whoever reaches it.
FOLDER=$(mktemp -d "${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}/clipscale-XXXXXXXX")
export CLIPSCALE_STORE="$FOLDER/group" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
exec torchrun --rdzv-backend c10d --rdzv-endpoint "$FOLDER/agent" --rdzv-conf store_type=file --local-addr localhost \
    --nproc-per-node "${PROCS:-gpu}" --max-restarts "${RESTARTS:-0}" -m clipscale train "$@"
