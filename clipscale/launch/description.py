"""One description of a job, made from a run's settings, for every scheduler: what it runs, and on what."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.config.redact import redact
from clipscale.config.sections import JobConfig
from clipscale.config.train import TrainConfig

OPTIONS = {"kubernetes": ("kind", "namespace", "runtime", "env_from", "queue"), "torchrun": (), "local": ()}
"""Names in `job.options`; sbatch has its own."""


@dataclass(frozen=True)
class Job:
    """What a scheduler starts: `procs` processes of `clipscale train WORDS` on each node."""

    name: str
    words: tuple[str, ...]
    procs: int
    gpus: bool
    grace_s: int
    """Seconds from the request to save to the end of the processes."""
    restarts: int
    config: JobConfig

    @property
    def command(self) -> tuple[str, ...]:
        """The command of every process, by this interpreter or the container's."""
        python = "python" if self.config.image else sys.executable
        return (python, "-m", "clipscale", "train", *self.words)

    @property
    def agent(self) -> tuple[str, ...]:
        """The beginning of torchrun's command; the command without its interpreter is the end."""
        return (self.command[0], "-m", "clipscale.launch.torchrun", f"--max-restarts={self.restarts}")

    @property
    def mebibytes(self) -> int | None:
        """Host memory of a node, rounded up."""
        return self.config.memory and -(-self.config.memory // 2**20)

    def mounts(self) -> list[tuple[str, str]]:
        """(source, target) of every mount."""
        return [(source, target) for source, _, target in (mount.rpartition(":") for mount in self.config.mounts)]

    def variables(self) -> dict[str, str | None]:
        """The environment; None: the value is known elsewhere."""
        pairs = (variable.partition("=") for variable in self.config.env)
        return {name: value if equals else None for name, equals, value in pairs}


def describe(config: TrainConfig, argv: Sequence[str], *, named: bool) -> Job:
    """The job of a run whose checked settings are `config`, composed from `argv`. Raises UserError for what no scheduler can run.

    `named`: whether the user has named the run. Under torchrun the ranks agree on a default name; elsewhere it is fixed here, so that a
    job which comes back finds its folder.
    """
    job = config.job
    check(config)
    folder = Path(config.run)
    fixed = named or job.scheduler != "torchrun"
    words = [word for word in argv if not re.match(r"(launch|run|launch\.procs|job\..*?)=", word.lstrip("+"))]
    words += [f"run={config.run}"] * fixed + ["job.scheduler=local"]
    if job.scheduler == "local" and config.launch.procs:
        words.append(f"launch.procs={config.launch.procs}")
    if job.scheduler != "torchrun":
        refuse_secrets([*words, *job.env])
    return Job(
        name=(fixed and re.sub(r"[^a-z0-9-]+", "-", folder.name.lower()).strip("-")[:50]) or "clipscale",
        words=tuple(words),
        procs=config.launch.procs or 1,
        gpus=config.device != "cpu",
        grace_s=round(config.launch.grace_s),
        restarts=config.launch.restarts,
        config=job,
    )


def refuse_secrets(words: Sequence[str]) -> None:
    """Raise UserError for settings that hold a secret: a queue shows a job's words to everybody, and stores them."""
    for word in words:
        if redact(word) != word and "${oc.env:" not in word:
            name = word.partition("=")[0]
            raise UserError(
                f"{name} holds a secret, which everybody could read in the queue; put it into an environment variable and give "
                f"'{name}=${{oc.env:VARIABLE}}' and job.env=[VARIABLE]"
            )


def check(config: TrainConfig) -> None:
    """Raise UserError for settings of the job that miss something or contradict each other."""
    job = config.job
    if job.scheduler != "local" and config.launch.procs is None:
        raise UserError(
            f"launch.procs is not set; give the processes (GPUs) of a node, as in launch={job.scheduler} launch.procs=8"
        )
    for name in job.options if job.scheduler in OPTIONS else ():
        if name not in OPTIONS[job.scheduler]:
            known = ", ".join(OPTIONS[job.scheduler]) or "none"
            raise UserError(f"job.options.{name}: not an option of launch={job.scheduler}; there are: {known}")
    for mount in job.mounts:
        source, colon, target = mount.rpartition(":")
        if not (source and colon and target.startswith("/")):
            raise UserError(
                f"job.mounts={mount}: give SOURCE:TARGET, where TARGET is an absolute path in the container"
            )
    for variable in job.env:
        if not re.fullmatch(r"[A-Za-z_]\w*(=.*)?", variable, re.DOTALL):
            raise UserError(f"job.env={variable}: give NAME=VALUE, or NAME")
    if job.scheduler == "slurm":
        missing = [name for name in job.env if "=" not in name and name not in os.environ]
        if missing:
            raise UserError(
                f"job.env={missing[0]}: the environment variable is not set; export it, or give {missing[0]}=VALUE"
            )
    if job.scheduler == "torchrun" and job.nodes > 1 and not re.fullmatch(r".+:\d+", job.head):
        raise UserError("job.head is not set; give HOST:PORT of one of the machines, the same on all of them")
    if job.scheduler == "kubernetes":
        if not job.image:
            raise UserError("job.image is not set; give the image that Kubernetes starts (docker/Dockerfile makes one)")
        targets = [mount.rpartition(":")[2].rstrip("/") for mount in job.mounts]
        if not any(config.run.startswith(target + "/") for target in targets):
            raise UserError(
                f"run={config.run} would be lost with its pod; mount storage and name the run in it: "
                "job.mounts=[CLAIM:/storage] run=/storage/runs/NAME"
            )
