#!/usr/bin/env bash
# One machine under torchrun, one worker per GPU. PROCS=N sets another number, also on a machine without GPUs.
#
#   launch/torchrun-single.sh model=vit-l14 batch=64k data.train='/data/laion/{00000..41455}.tar'
#
# `clipscale train` alone does the same. Use this script for torchrun's own options, such as RESTARTS=N.
set -euo pipefail
exec python -m clipscale.launch.torchrun --standalone \
    --nproc-per-node "${PROCS:-gpu}" --max-restarts "${RESTARTS:-0}" -m clipscale train "$@"
