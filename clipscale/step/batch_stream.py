"""What a step needs of the stream of its batches. `TrainStream` (data/loader/stream.py) is one."""

from typing import Protocol

from clipscale.common.errors import UserError
from clipscale.data.loader.host_batch import HostBatch


class BatchStream(Protocol):
    """Fills the batch of a step, and meanwhile the next one."""

    # Seconds that this process has waited for samples.
    waited_s: float
    # Why no more samples arrive; None while they do. After a failure the present batch may be incomplete.
    failure: UserError | None

    def raise_failure(self) -> None:
        """Raise the `failure`, if there is one."""

    def upcoming(self) -> HostBatch | None:
        """The batch of the next step, if all its samples have arrived; otherwise None. Does not wait."""

    def discard_last_batch(self) -> None:
        """Discard the present batch, so that a resumed run begins with it."""
