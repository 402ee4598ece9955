"""The settings of `clipscale plan`, and the machine that it plans for."""

from dataclasses import asdict, dataclass, replace

from clipscale.common.errors import UserError
from clipscale.common.hardware import Hardware, gpu_here, hardware, hardware_of
from clipscale.config.eval import existing_run
from clipscale.config.setting import differing, setting
from clipscale.config.train import TrainConfig, check_divisible, check_sigmoid


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """`clipscale plan`: predict memory and time of a run from the settings of `train`; or compare with `run`."""

    hardware: str = setting(
        "", "The GPU: a100-80g, h100-80g, ... (a wrong name lists all), or `cpu`; empty: this machine."
    )
    gpus: int = setting(1, "GPUs per node; one process each.", least=1)
    nodes: int = setting(1, "Nodes.", least=1)
    host_memory: int | None = setting(None, "Host memory of a node in bytes (`1024G`); null: not compared.")
    fit: bool = setting(False, "Find the largest batch that fits, and the fastest chunks and offload.")
    json: bool = setting(False, "Print one JSON object instead of tables.")


def on_machine(config: PlanConfig) -> PlanConfig:
    """The settings with the machine to plan for: this one's GPUs, or with `fit` its CPU, where they name none.

    Raises UserError for GPUs that the table does not have.
    """
    if config.run or config.hardware:
        return config
    gpu = gpu_here()
    name = "cpu" if config.fit else None
    if gpu:
        name = hardware_of(gpu)
    if name is None:
        raise UserError("hardware is not set; give the GPU, hardware=a100-80g, or run=NAME to compare with a run")
    import torch

    from clipscale.data.loader.memory import free_memory

    memory = config.host_memory or free_memory()
    return replace(config, hardware=name, gpus=max(1, torch.cuda.device_count()), nodes=1, host_memory=memory)


def target_gpu(config: PlanConfig) -> Hardware | None:
    """The GPU to plan for; None for a CPU, and with `run`, which names its own. Raises UserError."""
    if config.run:
        existing_run(config.run)
        plain = PlanConfig(run=config.run, fit=config.fit, json=config.json)
        if others := differing(asdict(plain), asdict(config)):
            raise UserError(f"run={config.run}: a run is planned with its own settings; leave out {next(iter(others))}")
        return None
    gpu = None if config.hardware == "cpu" else hardware(config.hardware)
    check_sigmoid(config)
    check_divisible(config.batch, config.gpus * config.nodes, f"gpus={config.gpus} x nodes={config.nodes}")
    return gpu
