"""`clipscale data check`: read everything once and say what is wrong with it, with the reasons that training would count.

Shards are read by several processes; what they send back is small: counts, histograms, hashes, a few pictures.
"""

import base64
import hashlib
import heapq
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from clipscale.data.decode import IMAGE_TYPES, BrokenSampleError, decode_rgb, image_bytes, resize
from clipscale.data.filters import Selection
from clipscale.data.order import CounterRNG, key
from clipscale.data.sample import RawSample, limits
from clipscale.data.shards import index, indexing
from clipscale.data.shards.access import Access, leaf_of, scheme_of
from clipscale.data.shards.reader import ReadProblem, read_shard

EXAMPLES = 20
"""Names kept of the samples broken for one reason, per shard."""
THUMBNAIL = 128
MOST_CHARACTERS, MOST_SIDE, ASPECTS = 2047, 16383, 160
"""Ends of the histograms: caption lengths, shorter sides in pixels, and 16ths of an octave of longer over shorter side."""


@dataclass(frozen=True)
class Task:
    """What each process is told."""

    selection: Selection
    max_pixels: int
    max_bytes: int
    pictures: int
    seed: int
    near: bool
    access: Access
    index_cache: str | None


@dataclass(frozen=True, order=True)
class Picture:
    """A thumbnail; those of the smallest `rank` are kept, which makes them a random sample whatever the order of reading."""

    rank: int
    name: str
    caption: str
    width: int
    height: int
    jpeg: bytes = field(repr=False)


@dataclass
class Findings:
    """What was found in one shard, or, added up, in all."""

    shards: int = 0
    samples: int = 0
    usable: int = 0
    size: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """What the filters would leave out."""
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Reason -> names and details of some of the samples."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Shard -> why it could not be read to its end."""
    mismatch: dict[str, str] = field(default_factory=dict)
    """Shard -> how it differs from its index."""
    unindexed: int = 0
    characters: np.ndarray = field(default_factory=lambda: np.zeros(MOST_CHARACTERS + 1, np.int64))
    sides: np.ndarray = field(default_factory=lambda: np.zeros(MOST_SIDE + 1, np.int64))
    aspects: np.ndarray = field(default_factory=lambda: np.zeros(ASPECTS + 1, np.int64))
    formats: Counter[str] = field(default_factory=Counter)
    pictures: list[Picture] = field(default_factory=list)
    names: list[tuple[str, bytes]] = field(default_factory=list)
    """Shard and its keys, a line each, compressed."""
    hashes: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """What duplicates are found by (`key`, `bytes`, `look`) -> per shard one uint64 for every key in `names`, 0 for none."""

    def add(self, other: "Findings", pictures: int) -> None:
        """Take in another shard's."""
        for name in ("shards", "samples", "usable", "size", "unindexed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("broken", "dropped", "formats", "damaged", "mismatch"):
            getattr(self, name).update(getattr(other, name))
        for reason, named in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + named)[: 5 * EXAMPLES]
        for histogram in ("characters", "sides", "aspects"):
            getattr(self, histogram).__iadd__(getattr(other, histogram))
        self.pictures = heapq.nsmallest(pictures, self.pictures + other.pictures)
        self.names += other.names
        for kind, hashes in other.hashes.items():
            self.hashes.setdefault(kind, []).extend(hashes)


def survey(url: str, task: Task) -> Findings:
    """Read one shard and every picture in it."""
    found = Findings(shards=1)
    store, problem = indexing.HashingStore(task.access), ReadProblem()
    keys: list[str] = []
    hashes: dict[str, list[int]] = {kind: [] for kind in ("key", "bytes", "look")[: 3 if task.near else 2]}
    leaf = leaf_of(url)
    for sample in read_shard(
        url, problem, kinds=limits(IMAGE_TYPES, task.selection.members(), task.max_bytes), store=store
    ):
        found.samples += 1
        keys.append(sample.key)
        hashes["key"].append(_hash(sample.key.encode("utf-8", "surrogatepass")))
        try:
            pixels, data = _look(sample, task, found)
        except BrokenSampleError as error:
            group = found.dropped if error.reason.startswith("filter_") else found.broken
            group[error.reason] += 1
            named = found.examples.setdefault(error.reason, [])
            if len(named) < EXAMPLES:
                named.append((f"{leaf}/{sample.key}", str(error)[:200]))
            pixels, data = None, b""
        hashes["bytes"].append(_hash(data) if data else 0)
        if task.near:
            hashes["look"].append(0 if pixels is None else look(pixels))
    found.usable = found.samples - found.broken.total() - found.dropped.total()
    if problem.reason:
        found.damaged[url] = f"{problem.reason}: {problem.detail}"
    found.names.append(
        (leaf, zlib.compress("\n".join(name.replace("\n", " ") for name in keys).encode("utf-8", "surrogatepass"), 1))
    )
    found.hashes = {kind: [np.array(values, dtype=np.uint64)] for kind, values in hashes.items()}
    _compare(url, task, store.digest.hexdigest(), found)
    return found


def _look(sample: RawSample, task: Task, found: Findings) -> tuple[np.ndarray, bytes]:
    """Use a sample as training would; its pixels and the picture's bytes. Raises BrokenSampleError."""
    if sample.damage:
        raise BrokenSampleError(sample.damage, sample.detail)
    rank = key(task.seed, _hash(f"{leaf_of(sample.url)}/{sample.key}".encode("utf-8", "surrogatepass")), sample.index)
    caption = task.selection.caption(sample.members, CounterRNG(rank))
    data = image_bytes(sample.members)
    pixels = decode_rgb(data, task.max_pixels)
    height, width = pixels.shape[:2]
    found.characters[min(len(caption), MOST_CHARACTERS)] += 1
    found.sides[min(width, height, MOST_SIDE)] += 1
    found.aspects[min(int(16 * np.log2(max(width, height) / min(width, height))), ASPECTS)] += 1
    found.formats[next(name for name in IMAGE_TYPES if name in sample.members)] += 1
    task.selection.check(sample, caption)
    if task.pictures and (len(found.pictures) < task.pictures or rank < -found.pictures[0].rank):
        # a heap with the largest rank first: ranks are kept negative until the end of the shard
        name = f"{leaf_of(sample.url)}/{sample.key}"
        heapq.heappush(found.pictures, Picture(-rank, name, caption[:300], width, height, thumbnail(pixels)))
        if len(found.pictures) > task.pictures:
            heapq.heappop(found.pictures)
    return pixels, data


def thumbnail(pixels: np.ndarray) -> bytes:
    """A small JPEG of (H, W, C) uint8."""
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return out.getvalue()


def look(pixels: np.ndarray) -> int:
    """64 bits that pictures of the same look share: in an 8 x 9 grey copy, which neighbour is brighter (difference hash).

    Never 0, which stands for no picture.
    """
    grey = resize(pixels, 8, 9).astype(np.int32).sum(axis=0)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes(), "big") or 1


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def _compare(url: str, task: Task, sha256: str, found: Findings) -> None:
    """Note how the shard differs from its index."""
    if scheme_of(url) in index.NO_FILE:
        return
    entries = index.known([url], task.index_cache).get(url)
    try:
        found.size, stamp = index.stamp_of(url, task.access)
    except Exception as error:  # also noted as damaged by whoever read it
        found.damaged.setdefault(url, str(error))
        return
    entry = index.matching(entries or [], found.size, stamp)
    if not entries:
        found.unindexed = 1
    elif entry is None:
        found.mismatch[url] = "changed since it was indexed"
    elif entry.samples != found.samples:
        found.mismatch[url] = f"{found.samples} samples, {entry.samples} in the index"
    elif entry.sha256 not in (None, sha256):
        found.mismatch[url] = "its bytes are not those that were indexed (checksum)"


def surveyed(urls: Sequence[str], task: Task, workers: int) -> Iterator[tuple[str, Findings]]:
    """Every shard's findings, as they come."""
    for url, found in indexing.as_they_come(partial(survey, task=task), urls, workers):
        # the ranks as they were meant
        found.pictures = [replace(picture, rank=-picture.rank) for picture in found.pictures]
        yield url, found


# -- duplicates --------------------------------------------------------------------------------------------------------


def duplicates(found: Findings) -> dict[str, list[list[str]]]:
    """Kind -> groups of samples (SHARD/KEY, in the order of reading) that share a key, a picture's bytes, or a look."""
    result: dict[str, list[list[str]]] = {}
    order = sorted(range(len(found.names)), key=lambda n: found.names[n][0])
    keys: dict[int, list[str]] = {}
    for kind, parts in found.hashes.items():
        values = np.concatenate([parts[n] for n in order]) if order else np.zeros(0, np.uint64)
        ends = np.cumsum([len(parts[n]) for n in order])
        by_value = np.argsort(values, kind="stable")
        ordered = values[by_value]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.int64)
        groups = []
        for first, last in zip(starts, np.r_[starts[1:], len(ordered)]):
            if last - first > 1 and ordered[first]:
                groups.append([_name(found, order, ends, int(at), keys) for at in by_value[first:last]])
        result[kind] = groups
    return result


def _name(found: Findings, order: list[int], ends: np.ndarray, at: int, keys: dict[int, list[str]]) -> str:
    part = int(np.searchsorted(ends, at, side="right"))
    shard, packed = found.names[order[part]]
    if part not in keys:
        keys[part] = zlib.decompress(packed).decode("utf-8", "surrogatepass").split("\n")
    return f"{shard}/{keys[part][at - (int(ends[part - 1]) if part else 0)]}"


# -- summary -----------------------------------------------------------------------------------------------------------


def quantiles(histogram: np.ndarray, scale: Any = lambda value: value) -> dict[str, float]:
    """Minimum, 5 %, median, 95 % and maximum of what a histogram counts; empty for an empty one."""
    total = int(histogram.sum())
    if not total:
        return {}
    running = np.cumsum(histogram)
    shares = {"min": 0.0, "p05": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}
    return {
        name: scale(int(np.searchsorted(running, max(1, np.ceil(share * total))))) for name, share in shares.items()
    }


def summary(found: Findings, repeated: dict[str, list[list[str]]]) -> dict[str, Any]:
    """The findings, JSON-like."""
    return {
        "shards": found.shards,
        "bytes": found.size,
        "samples": found.samples,
        "usable": found.usable,
        "broken": dict(found.broken.most_common()),
        "dropped": dict(found.dropped.most_common()),
        "damaged_shards": found.damaged,
        "index": {"missing": found.unindexed, "mismatch": found.mismatch},
        "duplicates": {
            kind: {"groups": len(groups), "surplus": sum(len(group) - 1 for group in groups), "examples": groups[:100]}
            for kind, groups in repeated.items()
        },
        "caption_characters": quantiles(found.characters),
        "shorter_side": quantiles(found.sides),
        "aspect": quantiles(found.aspects, lambda step: round(2 ** (step / 16), 2)),
        "formats": dict(found.formats.most_common()),
        "examples": {reason: [list(pair) for pair in named] for reason, named in found.examples.items()},
    }


def is_broken(found: Findings) -> bool:
    """Whether anything is wrong; what filters drop, and duplicates, are not."""
    return bool(found.broken or found.damaged or found.mismatch)


def data_url(picture: Picture) -> str:
    """A thumbnail as it stands in a page."""
    return "data:image/jpeg;base64," + base64.b64encode(picture.jpeg).decode()
