"""Reads the raw samples of a shard that a run uses."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

from clipscale.data.sample import RawSample
from clipscale.data.shards.addresses import SourceError
from clipscale.data.shards.samples import ReadProblem as ReadProblem
from clipscale.data.shards.samples import read_samples
from clipscale.data.shards.store import Store
from clipscale.data.shards.subset import subset_of
from clipscale.data.shards.tar import DAMAGE


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
    and no members. With `indexed`, an index that holds for the shard is used: unwanted samples are skipped without a
    read (their key is empty), and damage costs only the sample that it lies in. With `data.only_keys` the shard has no
    other samples.
    """
    store = store or Store()
    subset = subset_of(store.config.only_keys)
    if subset is None:
        yield from read_samples(url, problem, want, kinds, store, indexed=indexed)
        return
    try:
        numbers = subset.numbers(url, store)
    except (SourceError, *DAMAGE) as error:
        problem.note(url, error, "unreadable_shard")
        return

    def in_subset(number: int) -> bool:
        return number in numbers and want(numbers[number])

    for raw in read_samples(url, problem, in_subset, kinds, store, indexed=indexed):
        if raw.index in numbers:
            yield replace(raw, index=numbers[raw.index])
