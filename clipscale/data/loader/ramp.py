"""The size of each step's batch: always the same, or growing over the first samples of a run."""

from bisect import bisect_right
from itertools import accumulate

from clipscale.common.errors import UserError
from clipscale.config.sections import RampConfig


class BatchSizes:
    """The global batch size of every step. It depends only on the settings, so a resumed run needs no state.

    Raises UserError for a ramp that cannot end at `batch`.
    """

    def __init__(self, batch: int, ramp: RampConfig | None = None, *, first: int = 0, earlier: int = 0) -> None:
        """Of a run, or of its stage that begins with step `first`, after `earlier` samples."""
        self.first, self.earlier, ramp = first, earlier, ramp or RampConfig()
        self.batch, unit = batch, ramp.start or batch
        if batch % unit:
            raise UserError(f"ramp.start={unit}: batch={batch} is no multiple of it; choose a divisor of the batch")
        if ramp.start and ramp.start < batch and not ramp.samples:
            raise UserError(f"ramp.start={ramp.start}: give ramp.samples=N, over which the batch grows to {batch}")
        stages: list[int] = []
        sizes: list[int] = []
        seen, factor = 0, 1
        while unit * factor < batch:
            stages.append(unit * factor)
            factor = 2 * factor if ramp.rule == "double" else factor + 1
        while stages and seen < ramp.samples:
            sizes.append(stages[seen * len(stages) // ramp.samples])
            seen += sizes[-1]
        self._sizes, self._ends = sizes, list(accumulate(sizes, initial=0))

    def at(self, step: int) -> int:
        """Samples in the batch of step 0, 1, ..."""
        step -= self.first
        return self._sizes[step] if step < len(self._sizes) else self.batch

    def before(self, step: int) -> int:
        """Samples of the run in all batches before that step."""
        step -= self.first
        ramped = min(step, len(self._sizes))
        return self.earlier + self._ends[ramped] + (step - ramped) * self.batch

    def samples(self, samples: int | None, epochs: float | None, epoch: int | None) -> int:
        """The samples of a run of `samples`, or of `epochs` of `epoch`. Raises UserError for less than a batch."""
        if samples is None:
            assert epochs is not None
            if epoch is None:
                raise UserError(f"epochs={epochs}: the samples of an epoch are not known for this data; give samples=N")
            samples = round(epochs * epoch)
        if samples < self.at(self.first):
            raise UserError(f"samples={samples} is less than one batch={self.at(self.first)}; nothing would be trained")
        return samples

    def steps(self, samples: int) -> int:
        """The step after the last whole batch in `samples`."""
        if samples < self._ends[-1]:
            return self.first + bisect_right(self._ends, samples) - 1
        return self.first + len(self._sizes) + (samples - self._ends[-1]) // self.batch


def check_ramp(size: int, batch: int, streams: int, world: int) -> None:
    """Raise UserError unless all batches from `size` to `batch` take equally many samples from each shard stream.

    The streams would reach the end of an epoch at different times.
    """
    if size == batch or (size % streams == 0 and batch % streams == 0):
        return
    fitting = [n for n in range(world, streams + 1, world) if size % n == 0 and batch % n == 0]
    remedy = f"set data.shard_streams={fitting[-1]}, or choose other batches" if fitting else "choose other batches"
    raise UserError(
        f"ramp.start, stages: batches of {size} to {batch} are not all multiples of {world} processes and of the "
        f"{streams} shard streams in which the data is read; {remedy}"
    )
