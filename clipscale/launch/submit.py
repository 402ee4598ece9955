"""Starts a described job with its scheduler, or prints exactly what would be started."""

import os
import shlex
import subprocess
from collections.abc import Sequence

from clipscale.common.errors import UserError
from clipscale.common.terminal import say, say_all
from clipscale.config.train import TrainConfig
from clipscale.launch import kubernetes, slurm
from clipscale.launch.description import Job, describe

SUBMIT = {
    "slurm": (slurm.script, ("sbatch", "--parsable"), "submit from a login node of the cluster"),
    "kubernetes": (
        kubernetes.manifest,
        ("kubectl", "create", "-o", "name", "-f", "-"),
        "install it, or take --dry-run",
    ),
}
"""Scheduler -> the job as text, the command that reads it, and what helps where there is no such command."""


def launch(config: TrainConfig, argv: Sequence[str], *, named: bool, dry_run: bool = False) -> int:
    """Submit the run with the checked settings `config`, composed from `argv`; with `dry_run` print the script, manifest or command line.

    torchrun replaces this process. Raises UserError.
    """
    job, scheduler = describe(config, argv, named=named), config.job.scheduler
    if scheduler in SUBMIT:
        render, command, remedy = SUBMIT[scheduler]
        if dry_run:
            say_all(render(job))
        else:
            number = handed_over(scheduler, command, render(job), remedy)
            log = f"; its output is in {job.name}-{number.partition(';')[0]}.log" if scheduler == "slurm" else ""
            say(f"job {number}: run={config.run}{log}")
        return 0
    words = torchrun(job) if scheduler == "torchrun" else job.command
    if dry_run:
        say(shlex.join(words))
    else:
        environment = {name: value for name, value in job.variables().items() if value is not None}
        os.execvpe(words[0], words, os.environ | environment)
    return 0


def handed_over(scheduler: str, command: Sequence[str], text: str, remedy: str) -> str:
    """Give the job, as `text`, to its scheduler's command; returns what that prints. Raises UserError."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"launch={scheduler}: there is no {command[0]} on this machine; {remedy}") from None
    if done.returncode:
        raise UserError(f"launch={scheduler}: {command[0]} refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def torchrun(job: Job) -> tuple[str, ...]:
    """torchrun's command line, the same on every machine."""
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint={job.config.head}", f"--rdzv-id={job.name}")
    place = meet if job.config.nodes > 1 else ("--standalone",)
    return (*job.agent, f"--nnodes={job.config.nodes}", f"--nproc-per-node={job.procs}", *place, *job.command[1:])
