"""Where a run's processes are started, described once for every scheduler."""

from dataclasses import dataclass
from typing import Any

from clipscale.config.setting import setting

PLACES = ("local", "torchrun", "slurm", "kubernetes")


@dataclass
class JobConfig:
    """Nodes, time limit, mounts and environment of a run, for `launch=torchrun`, `slurm` and `kubernetes`; `launch.procs` is per node."""

    scheduler: str = setting(
        "local",
        "`local`: this machine; `torchrun`: one of `job.nodes` machines, each of which runs the same line; `slurm`; `kubernetes`.",
        choices=PLACES,
    )
    nodes: int = setting(1, "Nodes, with `launch.procs` processes (and GPUs) each.", least=1)
    cpus: int | None = setting(None, "Cores per process; null: the scheduler's default.", least=1)
    memory: int | None = setting(
        None, "Host memory per node in bytes (`512G`); null: the scheduler's default.", least=1
    )
    hours: float | None = setting(None, "Time limit in hours; null: the scheduler's default.", least=0)
    head: str = setting("", "HOST:PORT of one of the machines, for torchrun on several.", literal=True)
    image: str = setting("", "Container image: for Kubernetes, and for Slurm with the plugin pyxis.", literal=True)
    mounts: list[str] = setting(
        [],
        "SOURCE:TARGET for the container. SOURCE is a path of the node or, for Kubernetes, the name of a volume claim.",
        literal=True,
    )
    env: list[str] = setting(
        [],
        "Environment of the processes: NAME=VALUE, or NAME alone: its value here (Slurm), or in the secret "
        "`job.options.env_from` (Kubernetes).",
        literal=True,
    )
    options: dict[str, Any] = setting(
        {},
        "Slurm: options of sbatch (`job.options.partition=gpu`). Kubernetes: `kind` (TrainJob or PyTorchJob), `namespace`, "
        "`runtime`, `env_from`, `queue` (of Kueue).",
    )
