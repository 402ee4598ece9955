"""Where a run's numbers go: JSON lines first, everything else derived from them."""

from dataclasses import dataclass


@dataclass
class LogConfig:
    """Sinks of the metrics besides `metrics.jsonl`, which is always written."""

    every: int = 1
    """Steps between console lines."""
    progress: bool = True
    """A live progress bar where the console is a terminal."""
    wandb: str = "disabled"
    """`online`, `offline` or `disabled`."""
    wandb_project: str = "clipscale"
    wandb_entity: str | None = None
    tensorboard: bool = False
