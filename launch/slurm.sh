#!/usr/bin/env bash
# A Slurm job, one task per GPU; what follows the script's name goes to `clipscale train`:
#
#   sbatch --nodes=8 launch/slurm.sh run=l14 model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'
#
# Three minutes before the time limit, or when it is preempted, the run is told to stop: it ends its step, saves, and the job goes back into
# the queue, to go on from there (resume=auto) until all samples are trained on. Give the run a name, on storage that all nodes share.
#SBATCH --job-name=clipscale
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 40000)) WORLD_SIZE=$SLURM_NTASKS
# The tasks' own environment says which of the processes each is. Slurm signals them directly: no launcher in between cuts the saving short.
# Once one has ended, for whatever reason, the others have two minutes: they end together, or wait for one that has failed.
srun --kill-on-bad-exit=0 --wait=120 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python -m clipscale train "$@"' clipscale "$@"
status=$?
if [ "$status" -eq 143 ]; then # stopped by SIGTERM, and saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
