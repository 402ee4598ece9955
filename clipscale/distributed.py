"""Process groups, local workers and reductions."""

from dataclasses import dataclass


@dataclass
class LaunchConfig:
    """How many worker processes `clipscale train` starts on this machine when it is not run under torchrun."""

    procs: int | None = None
    """None: one per visible GPU, or one on a machine without."""
    threads: int | None = None
    """CPU threads per worker; None: an even share of the cores."""
