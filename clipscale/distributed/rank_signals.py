"""Signals that ranks leave each other while they wait outside collectives."""

from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

# The store's key of the signal that a rank has left for the others.
SIGNAL = "signal"


@dataclass(frozen=True)
class RankSignals:
    """The last signal that a rank has left for the others."""

    # A connection for signals alone, because a waiting rank may be using the others. None with one process, or if
    # another program made the process group: a waiting rank then learns of no other rank's signal.
    store: dist.Store | None = None

    def publish(self, signal_number: int) -> None:
        """Leave a signal for the ranks that ask. Safe in any thread."""
        if self.store:
            with suppress(RuntimeError):  # the rank that hosts the store has ended, and with it the run
                self.store.set(SIGNAL, str(signal_number))

    def latest(self) -> int:
        """The signal that a rank has left; 0 without one."""
        if self.store:
            with suppress(RuntimeError):  # as in `publish`
                return int(self.store.get(SIGNAL)) if self.store.check([SIGNAL]) else 0
        return 0
