"""The settings of `clipscale plan`, and the machine that it plans for."""

from dataclasses import dataclass, replace

from clipscale.common.errors import UserError
from clipscale.common.hardware import Hardware, gpu_here, hardware, hardware_of
from clipscale.common.units import Bytes
from clipscale.config.checks import check_divisible, check_sigmoid
from clipscale.config.setting import setting
from clipscale.config.train_config import TrainConfig
from clipscale.launch.local import num_processes


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """`clipscale plan`: predict memory and time of a run from the settings of `train`."""

    hardware: str = setting(
        "", "The GPU: a100-80g, h100-80g, ... (a wrong name lists all), or `cpu`; empty: this machine's."
    )
    gpus: int = setting(
        1,
        "GPUs per node; one process each. Without `hardware`, 1 stands for all processes of a run here; for a plan of "
        "one give `launch.procs=1`.",
        least=1,
    )
    nodes: int = setting(1, "Nodes.", least=1)
    host_memory: Bytes | None = setting(
        None,
        "Host memory of a node (`512G`, `2T`); null: on a CPU or on this machine what is free, else not compared.",
    )
    json: bool = setting(False, "Print one JSON object instead of tables.")

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def local_batch(self) -> int:
        """A rank's samples of a batch. `target_gpu` checks that the ranks divide it."""
        return self.batch // self.ranks


def on_machine(config: PlanConfig) -> PlanConfig:
    """Complete the settings with the machine to plan for.

    If they name no hardware, it is this machine's GPUs, or its CPU if it has none or `device` says so, with as many
    processes as a run here, or `gpus`. A plan for a CPU is compared with this machine's free memory unless
    `host_memory` is set. Raises UserError for GPUs that the table does not have.
    """
    if config.run:
        raise UserError(f"run={config.run}: a plan is of settings; give those of the run, without its name")
    gpu = None if config.hardware or config.device == "cpu" else gpu_here()
    if config.hardware not in ("", "cpu"):
        return config
    from clipscale.common.memory import free_memory

    config = replace(config, host_memory=config.host_memory or Bytes(free_memory()))
    if gpu is None:
        return replace(config, hardware="cpu", gpus=config.gpus if config.gpus > 1 else config.launch.procs or 1)
    name = hardware_of(gpu)
    if name is None:
        raise UserError(
            f"hardware is not set, and {gpu} is not in the table; give one like it, as in hardware=a100-80g"
        )
    return replace(config, hardware=name, gpus=config.gpus if config.gpus > 1 else num_processes(config))


def target_gpu(config: PlanConfig) -> Hardware | None:
    """The GPU to plan for; None for a CPU. Raises UserError."""
    gpu = None if config.hardware == "cpu" else hardware(config.hardware)
    check_sigmoid(config)
    check_divisible(config.batch, config.ranks, f"gpus={config.gpus} x nodes={config.nodes}")
    return gpu
