"""Reads every sample of a set once and reports what is wrong with it, by the reasons that training counts.

Several processes read shards and send back little: counts, histograms, hashes, a few thumbnails.
"""

import base64
import heapq
import io
import zlib
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from html import escape
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from clipscale.common.units import format_bytes
from clipscale.config.tools import CheckSettings
from clipscale.data import decode
from clipscale.data.decode import IMAGE_TYPES, image_bytes, resize
from clipscale.data.filters import Selection
from clipscale.data.order import CounterRNG, key
from clipscale.data.sample import BrokenSampleError, RawSample, limits
from clipscale.data.shards import index
from clipscale.data.shards.access import Access, hash64, leaf_of, scheme_of
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.scan import HashingStore
from clipscale.report.table import TextTable

EXAMPLES = 20
"""Samples named per reason and shard."""
THUMBNAIL = 128
"""Longer side of a thumbnail in pixels."""
DUPLICATES = {"key": "keys", "bytes": "pictures, byte for byte", "look": "pictures that look alike"}


class Picture(NamedTuple):
    """A thumbnail. The pictures of smallest rank are kept: a random sample that does not depend on the order of reading."""

    rank: int
    name: str
    caption: str
    width: int
    height: int
    jpeg: bytes


class ShardKeys(NamedTuple):
    """The keys of one shard's samples, compressed, and their hashes."""

    shard: str
    packed: bytes
    hashes: dict[str, np.ndarray]
    """For each kind of duplicate one uint64 a sample; 0 for a sample without a picture."""

    def names(self) -> list[str]:
        """SHARD/KEY of every sample."""
        lines = zlib.decompress(self.packed).decode("utf-8", "surrogatepass")
        return [f"{self.shard}/{line}" for line in lines.split("\n")]


@dataclass
class Findings:
    """Results for one shard, or the sum over several."""

    shards: int = 0
    samples: int = 0
    usable: int = 0
    size: int = 0
    unindexed: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """Samples that the filters would leave out."""
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Reason -> names and details of some samples."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Shard -> why it could not be read to its end."""
    mismatch: dict[str, str] = field(default_factory=dict)
    """Shard -> how it differs from its index."""
    characters: Counter[int] = field(default_factory=Counter)
    """Captions of each length."""
    sides: Counter[int] = field(default_factory=Counter)
    """Pictures of each shorter side, in pixels."""
    aspects: Counter[int] = field(default_factory=Counter)
    """Pictures of each ratio of longer to shorter side, in 16ths of an octave."""
    formats: Counter[str] = field(default_factory=Counter)
    pictures: list[Picture] = field(default_factory=list)
    keys: list[ShardKeys] = field(default_factory=list)

    def add(self, other: "Findings", pictures: int) -> None:
        """Add another shard's results, keeping that many pictures."""
        for name in ("shards", "samples", "usable", "size", "unindexed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("broken", "dropped", "damaged", "mismatch", "characters", "sides", "aspects", "formats"):
            getattr(self, name).update(getattr(other, name))
        for reason, named in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + named)[: 5 * EXAMPLES]
        self.keys += other.keys
        self.pictures = heapq.nsmallest(pictures, self.pictures + other.pictures)

    @property
    def failed(self) -> bool:
        """Whether anything is wrong. Filtered samples and duplicates are not."""
        return bool(self.broken or self.damaged or self.mismatch)


def scan(url: str, settings: CheckSettings, selection: Selection) -> Findings:
    """Read one shard and every picture in it."""
    found = Findings(shards=1)
    store, problem = HashingStore(Access(pipes=settings.allow_pipe, root=settings.table.root)), ReadProblem()
    keys: list[str] = []
    hashes: dict[str, list[int]] = {kind: [] for kind in list(DUPLICATES)[: 3 if settings.near_duplicates else 2]}
    kinds = limits(IMAGE_TYPES, selection.members(), settings.max_bytes)
    for sample in read_shard(url, problem, kinds=kinds, store=store):
        found.samples += 1
        keys.append(sample.key.replace("\n", " "))
        hashes["key"].append(_hash(sample.key))
        try:
            pixels, data = _use(sample, settings, selection, found)
        except BrokenSampleError as error:
            group = found.dropped if error.reason.startswith("filter_") else found.broken
            group[error.reason] += 1
            named = found.examples.setdefault(error.reason, [])
            if len(named) < EXAMPLES:
                named.append((_name(sample), str(error)[:200]))
            pixels, data = None, b""
        hashes["bytes"].append(_hash(data) if data else 0)
        if settings.near_duplicates:
            hashes["look"].append(0 if pixels is None else look(pixels))
    found.usable = found.samples - found.broken.total() - found.dropped.total()
    if problem.reason:
        found.damaged[url] = f"{problem.reason}: {problem.detail}"
    packed = zlib.compress("\n".join(keys).encode("utf-8", "surrogatepass"), 1)
    arrays = {kind: np.array(values, dtype=np.uint64) for kind, values in hashes.items()}
    found.keys = [ShardKeys(leaf_of(url), packed, arrays)]
    if scheme_of(url) not in index.NO_FILE:
        _compare_with_index(url, settings.cache, store, found)
    return found


def _use(sample: RawSample, settings: CheckSettings, selection: Selection, found: Findings) -> tuple[np.ndarray, bytes]:
    """The sample's pixels, (H, W, C), and its picture's bytes, read as in training. Raises BrokenSampleError."""
    if sample.damage:
        raise BrokenSampleError(sample.damage, sample.detail)
    rank = key(settings.seed, _hash(_name(sample)), sample.index)
    caption = selection.caption(sample.members, CounterRNG(rank))
    data = image_bytes(sample.members)
    pixels = decode.Picture(data, settings.max_pixels).decode()
    height, width = pixels.shape[:2]
    short, long = sorted((width, height))
    found.characters[len(caption)] += 1
    found.sides[short] += 1
    found.aspects[int(16 * np.log2(long / short))] += 1
    found.formats[next(name for name in IMAGE_TYPES if name in sample.members)] += 1
    selection.check(sample, caption)
    if settings.pictures and (len(found.pictures) < settings.pictures or rank < found.pictures[-1].rank):
        image, out = Image.fromarray(pixels), io.BytesIO()
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(out, "JPEG", quality=80)
        insort(found.pictures, Picture(rank, _name(sample), caption[:300], width, height, out.getvalue()))
        del found.pictures[settings.pictures :]
    return pixels, data


def look(pixels: np.ndarray) -> int:
    """A 64-bit difference hash: which neighbour is brighter in an 8 x 9 grey copy. Never 0, which stands for no picture."""
    grey = resize(pixels, 8, 9).astype(np.int32).sum(axis=0)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes(), "big") or 1


def _hash(data: str | bytes) -> int:
    return hash64(data) or 1


def _name(sample: RawSample) -> str:
    return f"{leaf_of(sample.url)}/{sample.key}"


def _compare_with_index(url: str, cache: str | None, store: HashingStore, found: Findings) -> None:
    """Note how the shard, which the store has read, differs from its index."""
    entries = index.known([url], cache).get(url)
    try:
        state = index.state_of(url)
        found.size = state[0]
    except Exception as error:  # reading the shard met the same error and has noted it
        found.damaged.setdefault(url, str(error))
        return
    entry = index.matching(entries or [], state)
    if not entries:
        found.unindexed = 1
    elif entry is None:
        found.mismatch[url] = "changed since it was indexed"
    elif entry.samples != found.samples:
        found.mismatch[url] = f"{found.samples} samples, {entry.samples} in the index"
    elif entry.sha256 not in (None, store.hasher.hexdigest()):
        found.mismatch[url] = "its bytes are not those that were indexed (checksum)"


def duplicates(found: Findings) -> dict[str, list[list[str]]]:
    """Kind -> groups of samples (SHARD/KEY, in the order of reading) that share a key, a picture's bytes, or a look."""
    shards = sorted(found.keys, key=lambda part: part.shard)
    ends = np.cumsum([len(part.hashes["key"]) for part in shards])
    names_of = cache(lambda number: shards[number].names())

    def name(at: int) -> str:
        number = int(np.searchsorted(ends, at, side="right"))
        return names_of(number)[at - int(ends[number])]  # counted from the shard's end

    result: dict[str, list[list[str]]] = {}
    for kind in shards[0].hashes if shards else ():
        values = np.concatenate([part.hashes[kind] for part in shards])
        by_value = np.argsort(values, kind="stable")
        ordered = values[by_value]
        edges = np.r_[0, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(ordered)]
        repeated = [(edges[n], edges[n + 1]) for n in np.flatnonzero(np.diff(edges) > 1)]
        result[kind] = [[name(at) for at in by_value[a:b].tolist()] for a, b in repeated if ordered[a]]
    return result


def quantiles(histogram: Counter[int]) -> dict[str, int]:
    """Minimum, 5 %, median, 95 % and maximum of the values; empty for none."""
    values = sorted(histogram)
    running = np.cumsum([histogram[value] for value in values])
    shares = {"min": 0.0, "p05": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0} if values else {}
    return {name: values[np.searchsorted(running, max(1, share * running[-1]))] for name, share in shares.items()}


def summary(found: Findings, repeated: dict[str, list[list[str]]]) -> dict[str, Any]:
    """The contents of check.json."""
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
            kind: {"groups": len(groups), "surplus": sum(map(len, groups)) - len(groups), "examples": groups[:100]}
            for kind, groups in repeated.items()
        },
        "caption_characters": quantiles(found.characters),
        "shorter_side": quantiles(found.sides),
        "aspect": {name: round(2 ** (step / 16), 2) for name, step in quantiles(found.aspects).items()},
        "formats": dict(found.formats.most_common()),
        "examples": {reason: [list(pair) for pair in named] for reason, named in found.examples.items()},
    }


def table(summary: dict[str, Any]) -> TextTable:
    """The summary as rows: what, how many, and a remark."""
    samples = max(summary["samples"], 1)

    rows = [("samples", str(summary["samples"]), f"in {summary['shards']} shards, {format_bytes(summary['bytes'])}")]
    shares = [("usable", summary["usable"])]
    shares += [(f"{kind}: {reason}", n) for kind in ("broken", "dropped") for reason, n in summary[kind].items()]
    rows += [(name, str(count), f"{100 * count / samples:.2f} %") for name, count in shares]
    rows += [("damaged shard", url, why.replace(f"{url}: ", "")) for url, why in summary["damaged_shards"].items()]
    rows += [("index mismatch", url, why) for url, why in summary["index"]["mismatch"].items()]
    if summary["index"]["missing"]:
        rows.append(("shards without an index", str(summary["index"]["missing"]), "run `clipscale data index`"))
    for kind, what in summary["duplicates"].items():
        rows.append((f"duplicate {DUPLICATES[kind]}", str(what["surplus"]), f"{what['groups']} groups"))
    labels = {"caption_characters": "caption, characters", "shorter_side": "shorter side, pixels"}
    for name, label in (labels | {"aspect": "longer over shorter side"}).items():
        if values := summary[name]:
            low, high = f"{values['min']} to {values['max']}", f"5 % {values['p05']}, 95 % {values['p95']}"
            rows.append((label, str(values["median"]), f"median; {low}; {high}"))
    if kinds := ", ".join(f"{name} {count}" for name, count in summary["formats"].items()):
        rows.append(("formats", "", kinds))
    return TextTable(("", "", ""), [rows], left=("",))


STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse}td{padding:.15em .9em .15em 0;text-align:left;
vertical-align:top}table.counts td:nth-child(2){text-align:right;font-variant-numeric:tabular-nums}.grid{display:grid;gap:14px;
grid-template-columns:repeat(auto-fill,minmax(140px,1fr))}figure{margin:0}img{max-width:100%;display:block;background:#eee}
figcaption{font-size:12px;line-height:1.35;overflow-wrap:anywhere}figcaption p{margin:0;max-height:6.75em;
overflow:auto}small{color:#777}"""


def page(found: Findings, summary: dict[str, Any], title: str) -> str:
    """check.html, one self-contained page: the table, a random sample of pictures with captions, and names of broken samples."""
    figures = [
        f'<figure><img src="data:image/jpeg;base64,{base64.b64encode(picture.jpeg).decode()}" alt="" loading="lazy">'
        f"<figcaption><p>{escape(picture.caption)}</p>"
        f"<small>{escape(picture.name)}, {picture.width} x {picture.height}</small></figcaption></figure>"
        for picture in found.pictures
    ]
    named = [
        f"<h2>{escape(reason)} ({(found.broken + found.dropped)[reason]})</h2>{TextTable(('', ''), [examples]).html()}"
        for reason, examples in sorted(found.examples.items())
    ]
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{table(summary).html('counts')}"
        f"<h2>A random sample</h2><div class=grid>{''.join(figures)}</div>{''.join(named)}</html>\n"
    )
    return text.encode("utf-8", "replace").decode()  # keys may hold bytes that are not UTF-8
