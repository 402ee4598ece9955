"""Reads the raw samples of a shard in their order: a tar file header by header, or by an index."""

import tarfile
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

from clipscale.data.sample import RawSample, key_and_extension
from clipscale.data.shards import index
from clipscale.data.shards.addresses import SourceError
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import DAMAGE, next_member, padded, read_exactly, skip, unpacked


@dataclass
class ReadProblem:
    """Why the rest of a shard could not be read; `read_shard` fills it in."""

    reason: str | None = None
    detail: str = ""


def read_shard(
    url: str,
    problem: ReadProblem,
    want: Callable[[int], bool] = lambda _: True,
    kinds: Mapping[str, int] | None = None,
    *,
    store: Store | None = None,
    indexed: bool = False,
) -> Generator[RawSample, None, None]:
    """The raw samples of a shard. Ends early where the shard cannot be read further, and sets `problem`.

    A sample is a run of members with one key (`sample.key_and_extension`); a repeated member is ignored. Members' names
    are never paths. Content is read only for samples whose index `want` accepts and for members in `kinds` (what
    `sample.limits` returns; None: all). A sample with a wanted member over its size limit has the damage `too_large`
    and no members. With `lazy`, the picture that a table's row names is read by the sample's `load`, not here. With
    `indexed`, an index that holds for the shard is used: unwanted samples are skipped without a read (their key is
    empty), and damage costs only the sample that it lies in. With `data.only_keys` the shard has no other samples.
    """
    raw: RawSample | None = None
    store = store or Store()
    try:
        if store.config.only_keys is not None:
            from clipscale.data.shards.subset import read_subset  # here: it reads by this function

            yield from read_subset(url, problem, want, store, kinds=kinds, indexed=indexed)
            return
        opened = store.open(url)
        with closing(opened.stream) as source:
            offsets = index.sample_offsets(url, opened) if indexed and source.seekable() else None
            if offsets is not None:
                for number, (start, stop) in enumerate(pairwise(offsets.tolist())):
                    raw = RawSample(url, "", number, {}, extent=stop - start)
                    if not want(number):
                        yield raw
                        continue
                    source.seek(start)
                    try:
                        while start < stop and (header := next_member(source)) is not None:
                            name, size, taken = header
                            left = padded(size)
                            start, named = start + taken + left, key_and_extension(name)
                            if named is not None:
                                raw.key = raw.key or named[0]
                                if start > stop or named[0] != raw.key:
                                    raise tarfile.ReadError(f"member {name!r} is not of this sample")
                                if raw.accepts(name, named[1], size, kinds):
                                    raw.members[named[1]] = read_exactly(source, size)
                                    left -= size
                            skip(source, left, True)
                    except (tarfile.TarError, ValueError) as error:
                        raw = RawSample(url, "", number, {}, "damaged_sample", str(error), raw.extent)
                    yield raw
                return
            archive, can_seek = unpacked(source)
            first, start, wanted = 0, 0, False
            while (header := next_member(archive)) is not None:
                name, size, taken = header
                left = padded(size)
                after, named = start + taken + left, key_and_extension(name)
                if named is not None:
                    key, extension = named
                    if raw is None or key != raw.key:
                        if raw is not None:
                            raw.extent = start - first
                            yield raw
                        raw, first = RawSample(url, key, 0 if raw is None else raw.index + 1, {}), start
                        wanted = want(raw.index)
                    if wanted and raw.accepts(name, extension, size, kinds):
                        raw.members[extension] = read_exactly(archive, size)
                        left -= size
                skip(archive, left, can_seek)
                start = after
            if raw is not None:
                raw.extent = start - first
                yield raw
            if can_seek and opened.size is not None and start > opened.size:
                raise tarfile.ReadError("ends within a member")
            while not source.seekable() and source.read(1 << 20):
                pass  # a command's failure shows at its end
    except SourceError as error:
        problem.reason, problem.detail = error.reason, f"{url}: {error}"
    except DAMAGE as error:
        problem.reason = "unreadable_shard" if raw is None else "truncated_shard"
        problem.detail = f"{url}: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
