"""Starts a described job with its scheduler, or prints exactly what would be started."""

import os
import shlex
from collections.abc import Sequence

from clipscale.config.train import TrainConfig
from clipscale.launch import kubernetes, slurm
from clipscale.launch.description import Job, describe
from clipscale.terminal import say, say_all


def launch(config: TrainConfig, argv: Sequence[str], *, named: bool, dry_run: bool = False) -> int:
    """Submit the run with the checked settings `config`, composed from `argv`; with `dry_run` print the script, manifest or command line.

    torchrun replaces this process. Raises UserError.
    """
    job = describe(config, argv, named=named)
    if config.job.scheduler == "slurm":
        if dry_run:
            say_all(slurm.script(job))
        else:
            say(f"job {slurm.submit(job)}: run={config.run}; its output is in {job.name}-JOB.log")
    elif config.job.scheduler == "kubernetes":
        if dry_run:
            say_all(kubernetes.manifest(job))
        else:
            say(f"{kubernetes.submit(job)}: run={config.run}")
    else:
        words = torchrun(job) if config.job.scheduler == "torchrun" else job.command
        if dry_run:
            say(shlex.join(words))
        else:
            environment = {name: value for name, value in job.variables() if value is not None}
            os.execvpe(words[0], list(words), os.environ | environment)
    return 0


def torchrun(job: Job) -> tuple[str, ...]:
    """torchrun's command line, the same on every machine."""
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint={job.config.head}", f"--rdzv-id={job.name}")
    place = meet if job.config.nodes > 1 else ("--standalone",)
    return (
        job.python, "-m", "clipscale.launch.torchrun", f"--max-restarts={job.restarts}",
        f"--nnodes={job.config.nodes}", f"--nproc-per-node={job.procs}", *place,
        *job.command[1:],
    )  # fmt: skip
