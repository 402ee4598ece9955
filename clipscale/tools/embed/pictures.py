"""Reads the pictures of an embedded set from the shards that it was made of."""

import io
from functools import cache

from clipscale.data.addresses import is_local
from clipscale.data.picture import broken_pictures, open_picture, rgb, turned_upright
from clipscale.data.sample import IMAGE_TYPES, BrokenSampleError, image_bytes, size_limits_of
from clipscale.data.shards.counts import count_samples
from clipscale.data.shards.index import sample_offsets
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.tools.embed.arrays import EmbeddedSet, Sample


def stored_picture(embedded: EmbeddedSet, sample: Sample) -> bytes:
    """A sample's encoded picture. Raises BrokenSampleError, also for an unreadable shard."""
    url = embedded.sources[sample["part"]]
    make_index(url)
    problem = ReadFailure()
    row = sample["row"]
    for raw in read_shard(url, problem, lambda n: n == row, size_limits_of(IMAGE_TYPES), offsets=sample_offsets):
        if raw.index == row:
            if raw.key != sample["key"]:
                raise BrokenSampleError("changed_shard", f"{url}: sample {row} is {raw.key}, not {sample['key']}")
            if raw.error:
                raise BrokenSampleError(raw.error, raw.detail)
            return image_bytes(raw.members)
    raise BrokenSampleError(problem.reason or "no_such_sample", problem.detail or str(sample))


@cache
def make_index(url: str) -> None:
    """Index a local shard: a sample is then found without reading those before it."""
    if is_local(url):
        count_samples([url])


def thumbnail(data: bytes, side: int) -> bytes:
    """A picture as an upright JPEG of at most side x side pixels. Raises BrokenSampleError."""
    out = io.BytesIO()
    with broken_pictures():
        image = rgb(open_picture(turned_upright(data)))
        image.thumbnail((side, side))
        image.save(out, "JPEG")
    return out.getvalue()
