"""How far a run has read its data: the position of each shard stream, and its form in a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypedDict

from clipscale.common.errors import UserError

# `StreamPosition` in a checkpoint: the epoch, the samples, and for each source its epoch and samples.
StreamStateDict = tuple[int, int, *tuple[Sequence[int], ...]]


class StreamPosition(NamedTuple):
    """How far a shard stream has been read. In a checkpoint it is a `StreamStateDict`."""

    epoch: int
    # Samples read in that epoch, broken ones included. With data.weights: usable samples given out; the epoch is 0.
    samples: int
    # With data.weights: for each source the epoch, and the samples read in it.
    sources: tuple[tuple[int, int], ...] = ()

    def state_dict(self) -> StreamStateDict:
        """The position in a checkpoint: `StreamPosition.from_state_dict` reads it."""
        return (self.epoch, self.samples, *self.sources)

    @staticmethod
    def from_state_dict(state: StreamStateDict) -> "StreamPosition":
        epoch, samples, *sources = state
        return StreamPosition(epoch, samples, tuple((source[0], source[1]) for source in sources))


class PositionStateDict(TypedDict):
    """`DataPosition` in a checkpoint. `at`: stream id -> its position."""

    order: str
    streams: int
    at: dict[str, StreamStateDict]


@dataclass(frozen=True)
class DataPosition:
    """Where the shard streams of a rank, or of a run, stand in an order of samples."""

    # Digest of what the position refers to; see `OrderedShards.order_fingerprint`.
    order_fingerprint: str
    # Shard streams of the run.
    num_streams: int
    # Stream id -> its position. Two ranks that read the same stream have the same position of it.
    by_stream: Mapping[int, StreamPosition] = field(default_factory=dict)

    def state_dict(self) -> PositionStateDict:
        """The position in a checkpoint: `DataPosition.from_state_dict` reads it."""
        at = {str(stream_id): position.state_dict() for stream_id, position in self.by_stream.items()}
        return {"order": self.order_fingerprint, "streams": self.num_streams, "at": at}

    @staticmethod
    def from_state_dict(state: PositionStateDict) -> "DataPosition":
        at = {int(stream_id): StreamPosition.from_state_dict(values) for stream_id, values in state["at"].items()}
        return DataPosition(state["order"], state["streams"], at)


def merge_positions(positions: Sequence[DataPosition]) -> DataPosition:
    """The run's position, merged from the ranks' positions. Raises UserError if ranks read different shards."""
    first = positions[0]
    if any(replace(position, by_stream={}) != replace(first, by_stream={}) for position in positions):
        raise UserError(
            "data.train: the processes see different shards; every node must have the same list, the same counts and "
            "the same clipscale"
        )
    by_stream = {stream_id: at for position in positions for stream_id, at in position.by_stream.items()}
    return replace(first, by_stream=by_stream)
