#!/usr/bin/env bash
# A Slurm job, one task per GPU. Arguments after the script's name go to `clipscale train`:
#
#   clipscale plan model=vit-l14 batch=1M hardware=h100-80g gpus=8 nodes=8 host_memory=1024G
#   sbatch --nodes=8 launch/slurm.sh run=l14 model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'
#
# `plan` says whether it fits. Three minutes before the time limit, or at preemption, Slurm sends SIGTERM: the run saves, and
# the job goes back into the queue and resumes until all samples are trained on. Give the run a name, on storage that all nodes share.
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
# Each task gets its rank from Slurm's variables. Slurm signals the tasks directly, so no launcher ends them before they have saved.
# When one task ends, for any reason, the others have two minutes: usually all end together, but after a failure they wait
# for the failed one.
# Neighbouring tasks get cores of one socket, as neighbouring GPUs usually share one (`nvidia-smi topo -m` shows it); by default they take
# turns. With the cores of a node divided by its GPUs as --cpus-per-task, no task lies on two sockets.
# Since Slurm 22.05 srun does not take over --cpus-per-task: without it, a task and all its loaders share one core.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --distribution=block:block --kill-on-bad-exit=0 --wait=120 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python -m clipscale train "$@"' clipscale "$@"
status=$?
case "$status" in
143) again=1 ;; # stopped by SIGTERM after saving
0 | 2 | 130) again=0 ;; # complete, a mistake, Ctrl-C
*) again=$((${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-3})) ;; # a crash, a lost rank, no memory, a time-out
esac
if [ "$again" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
