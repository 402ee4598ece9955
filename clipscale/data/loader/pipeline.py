"""Samples of the user's own pipeline, such as webdataset's, in place of shards (`data.pipeline=MODULE:FUNCTION`).

Each shard stream runs a pipeline of its own. A resumed run makes the pipelines again and skips what they gave before.
"""

import hashlib
import io
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pkgutil import resolve_name
from typing import Any

from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.loader.shard_reader import Item, ItemReader, OrderedShards, StreamPosition
from clipscale.data.order import Segment, default_streams, streams_fit
from clipscale.data.sample import RawSample
from clipscale.data.shards.store import Store

Pipeline = Callable[[int, int, int], Iterable[Mapping[str, Any]]]
"""`function(stream, streams, epoch)`: the samples of one shard stream in one epoch, as webdataset's stages pass them on.

A sample is a mapping: `__key__`, and members by extension: `jpg` or another image type (encoded bytes, or a PIL image), and `txt` or
`json` (bytes or text). The streams share the data among them. The same arguments must give the same samples, or a resumed run differs.
"""


@dataclass(frozen=True)
class PipelineSource:
    """The streams of a pipeline; what `OrderedShards` is for shards."""

    name: str  # MODULE:FUNCTION, by which workers import it
    streams: int
    seed: int
    samples: None = None  # of an epoch: not known

    def fingerprint(self) -> str:
        """A digest of everything that a position refers to, as far as it is known."""
        return hashlib.blake2b(f"pipeline {self.name} {self.streams}".encode(), digest_size=8).hexdigest()

    def function(self) -> Pipeline:
        """Raises UserError."""
        try:
            found = resolve_name(self.name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"data.pipeline={self.name}: cannot be imported ({error}); name MODULE:FUNCTION of an installed package, or put the "
                "module's folder into PYTHONPATH"
            ) from error
        if callable(found):
            return found
        raise UserError(
            f"data.pipeline={self.name}: is no function; it is called with the stream, the streams and the epoch"
        )

    def first_samples(self, count: int, kinds: Mapping[str, int], store: Store) -> Generator[RawSample, None, None]:
        """`count` samples of the first stream."""
        for number, sample in enumerate(islice(self.function()(0, self.streams, 0), count)):
            yield raw_sample(self.name, number, sample, kinds)


Source = OrderedShards | PipelineSource
"""Where the streams of a run take their samples."""


class PipelineReader(ItemReader):
    """Reads one stream of a pipeline. The stream counts as one shard."""

    def __init__(
        self, source: PipelineSource, start: StreamPosition, kinds: Mapping[str, int], tick: Callable[[], None]
    ) -> None:
        self._source, self._tick, self._function = source, tick, source.function()
        super().__init__(start, kinds)

    def _read(self) -> Generator[tuple[Segment, Item], None, None]:
        name, skip = self._source.name, self.index
        while True:
            number = -1
            for number, sample in enumerate(self._function(self._stream, self._source.streams, self.epoch)):
                self._tick()
                if number >= skip:
                    self.index = number + 1
                    segment = Segment(self._stream, self.epoch, number, None, None)
                    yield segment, raw_sample(name, number, sample, self._kinds)
            if number < 0:
                raise UserError(
                    f"data.pipeline={name}: gives no sample for stream {self._stream} of {self._source.streams} in epoch {self.epoch}; "
                    "give each stream some of the data, or lower data.shard_streams"
                )
            self.epoch, self.index, skip = self.epoch + 1, 0, 0


def raw_sample(name: str, number: int, sample: Mapping[str, Any], kinds: Mapping[str, int]) -> RawSample:
    """The members of a pipeline's sample that are needed. Raises UserError for what is no sample."""
    if not isinstance(sample, Mapping):
        raise UserError(
            f"data.pipeline={name}: gave {type(sample).__name__}, where a sample is a mapping such as "
            "{'__key__': '000', 'jpg': bytes, 'txt': 'a caption'}; leave out webdataset's to_tuple and batched"
        )
    raw = RawSample(str(sample.get("__url__", name)), str(sample.get("__key__", number)), number, {})
    for extension in filter(kinds.__contains__, sample):
        value = sample[extension]
        if isinstance(value, Image.Image):
            buffer = io.BytesIO()
            value.save(buffer, "PNG", compress_level=0)  # loses nothing
            value = buffer.getvalue()
        elif isinstance(value, str):
            value = value.encode("utf-8", "surrogatepass")
        if not isinstance(value, bytes | bytearray | memoryview):
            raise UserError(
                f"data.pipeline={name}: member '{extension}' of a sample is {type(value).__name__}; give bytes, text or a PIL image"
            )
        if raw.accepts(f"{raw.key}.{extension}", extension, len(value), kinds):
            raw.members[extension] = bytes(value)
    return raw


def pipeline_source(
    config: DataConfig, batch: int, world: int, seed: int, position: Mapping[str, Any] | None
) -> PipelineSource:
    """The source that `data.pipeline` names. Raises UserError."""
    assert config.pipeline is not None
    streams = int(position["streams"]) if position else config.shard_streams or default_streams(batch, world, None)
    if not streams_fit(streams, batch, None):
        raise UserError(f"data.shard_streams={streams}: too many for the batch of {batch}; take fewer")
    source = PipelineSource(config.pipeline, streams, seed)
    source.function()  # a wrong name ends the run here, not in a worker
    return source
