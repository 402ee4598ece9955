"""When a shard stream leaves a shard, and when it gives up, which ends the run."""

from collections import Counter

from clipscale.common.errors import DataError, LoaderError
from clipscale.data.filters import Selection
from clipscale.data.order import Segment
from clipscale.data.sample import BrokenSampleError, RawSample
from clipscale.data.shards.store import RETRIES, Store
from clipscale.data.shards.unusable import json_remedy, why_unusable

# A stream skips a broken sample. It leaves a shard after this many broken samples of it in a row.
MAX_BROKEN_IN_SHARD = 20_000
# It gives up after MAX_BROKEN broken samples in a row, or after MAX_UNUSABLE_SEGMENTS segments in a row without a
# usable sample. The limits are generous: one bad shard of a few must not end a run, and a stream of a small set may
# hold a single sample an epoch.
MAX_BROKEN = 200_000
MAX_UNUSABLE_SEGMENTS = 200
# It also gives up after this many unreachable shards in a row: the storage is gone, not a shard.
MAX_UNREACHABLE = 3


class GiveUpRule:
    """Counts the broken samples of a shard stream since its last usable sample."""

    def __init__(self, selection: Selection, store: Store) -> None:
        """`selection`: of the captions. `store`: opens a shard again, to say what it holds."""
        self._captions = [source.name for source in selection.captions]
        self._store = store
        # Reason -> broken samples.
        self._reasons: Counter[str] = Counter()
        # Segment, by its shuffle key and its shard -> broken samples that were read in it.
        self._segments: Counter[tuple[int, int]] = Counter()
        # Segments of shards that could not be reached.
        self._unreachable: set[tuple[int, int]] = set()

    def count_usable(self) -> None:
        """Count a usable sample: all counts begin again."""
        self._reasons.clear()
        self._segments.clear()
        self._unreachable.clear()

    def count_broken(self, error: BrokenSampleError, segment: Segment, item: RawSample) -> bool:
        """Count a broken sample. Returns whether to leave its shard. Raises UserError if the stream gives up."""
        segment_id = segment.shuffle_key, segment.shard
        self._reasons[error.reason] += 1
        self._segments.setdefault(segment_id, 0)  # a segment counts, even if none of its samples was read
        if not item.is_missing:
            self._segments[segment_id] += 1
            self._unreachable.clear()
        elif error.reason == "unreachable_shard":
            self._unreachable.add(segment_id)
        if len(self._unreachable) >= MAX_UNREACHABLE:
            raise LoaderError(
                f"data.train: {MAX_UNREACHABLE} shards in a row cannot be reached, each asked {RETRIES} times more "
                f"(the last: {error}); continue with resume=auto when the storage is back"
            )
        if len(self._segments) > MAX_UNUSABLE_SEGMENTS or self._segments.total() > MAX_BROKEN:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
            shard = item.url, self._captions, self._store
            holds = why_unusable(*shard) or json_remedy(*shard)
            raise DataError(
                f"data.train: no usable sample among the last {self._reasons.total()} of one shard stream ({reasons}; "
                f"the last: {item.url} {item.key}: {error}); "
                + (holds or "look at the shards, and at data.captions and data.filter")
            )
        return self._segments[segment_id] > MAX_BROKEN_IN_SHARD
