"""A job as a script for sbatch."""

import math
import shlex

from clipscale.launch.description import Job

BODY = """\
set -uo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 40000)) WORLD_SIZE=$SLURM_NTASKS
# Each task gets its rank from Slurm's variables. Slurm signals the tasks directly, so no launcher ends them before they have saved.
# When one task ends, for any reason, the others have two minutes: usually all end together, but after a failure they wait
# for the failed one.
# Since Slurm 22.05 srun does not take over --cpus-per-task: without it, a task and all its loaders share one core.
srun {options} --kill-on-bad-exit=0 --wait=120 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec "$@"' clipscale {command}
status=$?
case "$status" in
143) again=1 ;; # stopped by SIGTERM after saving
0 | 2 | 130) again=0 ;; # complete, a mistake, Ctrl-C
*) again=$((${{SLURM_RESTART_COUNT:-0}} < {restarts})) ;; # a crash, a lost rank, no memory, a time-out
esac
if [ "$again" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def script(job: Job) -> str:
    """The text that sbatch gets. A job that is stopped saves, returns to the queue, and resumes the same run."""
    config = job.config
    options: dict[str, object] = {
        "job-name": job.name,
        "nodes": config.nodes,
        "ntasks-per-node": job.procs,
        "gpus-per-node": job.procs if job.gpus else None,
        "cpus-per-task": config.cpus,
        "mem": job.mebibytes and f"{job.mebibytes}M",
        "time": config.hours and math.ceil(60 * config.hours),  # minutes
        "signal": f"TERM@{job.grace_s + 60}",
        "requeue": True,
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
        **config.options,
    }
    # `--name=value`; true: `--name`; null and false: nothing
    lines = [
        f"#SBATCH --{name}" + ("" if value is True else f"={value}")
        for name, value in options.items()
        if value is not None and value is not False
    ]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.variables().items() if value is not None]
    words = ['${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}']
    if config.image:
        words.append(f"--container-image={shlex.quote(config.image)}")
    if config.mounts:
        words.append("--container-mounts=" + shlex.quote(",".join(config.mounts)))
    body = BODY.format(options=" ".join(words), command=shlex.join(job.command), restarts=job.restarts)
    return "\n".join(["#!/usr/bin/env bash", *lines, *exports, body])
