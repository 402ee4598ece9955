"""The settings of `clipscale plan`: a run's own, and the machine it is meant for."""

from dataclasses import dataclass

from clipscale.config import TrainConfig


@dataclass
class PlanConfig(TrainConfig):
    """`clipscale plan`: memory and time of a run that has yet to start, by the settings of `train`; with `run`, beside what it measured."""

    hardware: str = ""
    """The GPU: a100-80g, a800-80g, h100-80g, h200-141g, ... (a wrong name lists them); `cpu`."""
    gpus: int = 1
    """GPUs of a node; one process each."""
    nodes: int = 1
    """Machines."""
    host: int | None = None
    """Memory of a node in bytes (`1024G`); null: not compared."""
    picture: int = 40_000
    """Mean bytes of a picture in the shards."""
    reserve: float = 0.05
    """Share of a GPU's memory to leave free: fragments, and what is not foreseen."""
    utilisation: float = 0.4
    """Share of the GPU's peak that the arithmetic is assumed to reach, for the time."""
    network: float = 25.0
    """GB/s that a GPU is assumed to send to another node, for the time."""
    json: bool = False
    """Print one JSON object instead of tables."""
