"""Save and resume a run."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: int = 0
    """Steps between checkpoints; 0: none by steps."""
    minutes: float = 30.0
    """Minutes between checkpoints; 0: none by time. The end of a run always writes one."""
    keep: int = 2
    """Newest checkpoints kept; 0: all."""
