"""The verb `clipscale data features`: writes a frozen image tower's features to shards, once, for training to read.

The shards keep their names, keys, order and members; features take the place of pictures.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipscale import distributed, files
from clipscale.config.checks import check_values
from clipscale.config.data import FEATURES
from clipscale.config.tools import FeaturesConfig
from clipscale.data.decode import IMAGE_TYPES, TrainTransform, image_bytes
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.features import NOTE, encoded_row
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, RawSample
from clipscale.data.shards.access import SourceError, leaf_of
from clipscale.data.shards.listing import access_of, count_samples, list_shards
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.data.shards.writer import shard_writer, write_counts
from clipscale.distributed import World
from clipscale.errors import UserError
from clipscale.models.towers import ClipModel, build_model
from clipscale.precision import Precision
from clipscale.terminal import say

log = logging.getLogger(__name__)

GROUP_BYTES = 256 << 20
"""Bytes of samples in memory at once: 256 pictures of a megabyte. A single sample may have 64 MiB."""
DAMAGED = ("truncated_shard", "unreadable_shard")
"""Reasons that lie in the shard itself, and stay. The others lie in the network or the server."""


def main(config: FeaturesConfig) -> Path:
    """Write the features of `data.train` to `out`. Under torchrun every rank takes its share of the shards. Raises UserError."""
    if not config.out:
        raise UserError("data features needs out=DIR")
    check_values(config)
    urls, _ = list_shards(config.data)
    twice = [name for name, count in Counter(map(leaf_of, urls)).items() if count > 1]
    if twice:
        raise UserError(
            f"data.train: two shards are called {twice[0]}; take sources one at a time, each with an out=DIR of its own"
        )
    out = Path(config.out).expanduser().resolve()
    if any("://" not in url and Path(url).expanduser().parent.resolve() == out for url in urls):
        raise UserError(
            f"out={config.out}: data.train has shards there, which would be overwritten; choose another folder"
        )
    world = distributed.start(config.device)
    try:
        return _write(config, urls, world)
    finally:
        distributed.stop()


def _write(config: FeaturesConfig, urls: Sequence[str], world: World) -> Path:
    torch.manual_seed(config.seed)
    model = build_model(config.model).eval()
    if world.main and not (config.model.weights or config.model.image.weights):
        log.warning("these are features of random weights, by seed=%d; give model.image.weights=PATH", config.seed)
    folder = Path(config.out).expanduser()
    kind = {
        "model": config.model.name,
        "weights": model.image_digest(),
        "width": model.width,
        "dtype": config.dtype,
        "member": FEATURES,
        "image_size": config.data.image_size or model.image_size,
        "mean": list(config.model.mean),
        "std": list(config.model.std),
        "transform": config.transform,
    }
    _write_note(folder, kind, world)
    model.image.to(world.device)
    precision = Precision(config.precision, world.device)
    precision.convert(model.image)
    writer = _Writer(config, model, precision, world.device)
    counts = {}
    for url in urls[world.rank :: world.size]:
        path = folder / leaf_of(url)
        count = writer.shard(url, path)
        if count is not None:
            counts[path.name] = count
            say(f"{path}: {count} samples")
    counts = {name: count for part in world.gather(counts) for name, count in part.items()}
    missing = sum(world.gather(writer.missing))
    unread = [problem for part in world.gather(writer.unread) for problem in part]
    if world.main:
        write_counts(folder, counts)
        lost = f", {missing} of them without features, for broken pictures" if missing else ""
        say(
            f"features of {sum(counts.values())} samples{lost}: {folder}; train with data.train={folder} data.image_features=true"
        )
    if unread:
        raise UserError(
            f"out={folder}: {len(unread)} of {len(urls)} shards could not be fetched and are not written (the first: {unread[0]}); "
            "start again to fetch them"
        )
    return folder


def _write_note(folder: Path, kind: dict[str, Any], world: World) -> None:
    """Write the note on the features' origin. Raises UserError, on every rank, where features of another kind are there already."""
    failure = None
    path = folder / NOTE
    try:
        if path.is_file() and files.read_tree(path).get("features") != kind:
            failure = f"out={folder}: holds features of another kind; choose another folder"
        elif world.main:
            folder.mkdir(parents=True, exist_ok=True)
            files.remove_leftovers(folder)  # no rank has begun to write
            files.write_json(path, {"features": kind})
    except (OSError, ValueError, KeyError) as error:
        failure = f"out={folder}: cannot be written ({error}); choose another folder"
    failure = next(filter(None, world.gather(failure)), None)
    if failure:
        raise UserError(failure)


class _Writer:
    """Writes shards on one rank."""

    def __init__(self, config: FeaturesConfig, model: ClipModel, precision: Precision, device: torch.device) -> None:
        self.config, self.model, self.precision, self.device = config, model, precision, device
        self.side = config.data.image_size or model.image_size
        self.missing = 0
        """Samples without a usable picture."""
        self.unread: list[str] = []
        """Why shards could not be fetched, one line each."""
        most = config.data.max_pixels
        self.whole = TrainTransform(self.side, (1.0, 1.0), (1.0, 1.0), 0.0, most)
        self.central = EvalTransform(self.side, most)

    def shard(self, url: str, path: Path) -> int | None:
        """Write one shard completely or not at all, unless it is there. Its number of samples; None if it could not be fetched.

        A damaged shard is written as far as it can be read: it will not get better. A shard that could not be fetched is left out,
        so that the next start fetches it again.
        """
        if path.is_file():
            return count_samples(str(path))
        problem = ReadProblem()
        data = self.config.data
        store = Store(access_of(data))
        written = 0
        try:
            with shard_writer(path) as writer, ThreadPoolExecutor(self.config.threads) as pool:
                raws = read_shard(url, problem, store=store)
                for group in groups(raws, self.config.batch):
                    pictures = list(pool.map(self.pixels, group))
                    self.missing += sum(picture is None for picture in pictures)
                    for raw, row in zip(group, self.features(pictures)):
                        writer.write(_sample(raw, row))
                    written += len(group)
                if problem.reason:
                    log.warning("%s after %d samples: %s", problem.reason, written, problem.detail)
                    if problem.reason not in DAMAGED:
                        raise SourceError(problem.reason, problem.detail)
        except SourceError:
            self.unread.append(problem.detail)
            return None
        except OSError as error:
            raise UserError(
                f"out={path.parent}: {path.name} cannot be written ({error.strerror}); free disk space and start again"
            ) from error
        return written

    def pixels(self, raw: RawSample) -> np.ndarray | None:
        """(C, S, S) uint8; None for a picture that cannot be used."""
        try:
            data = image_bytes(raw.members)
            if self.config.transform == "eval":
                return self.central(data)
            out = np.empty((3, self.side, self.side), np.uint8)
            self.whole(data, CounterRNG(0), out)
        except BrokenSampleError as error:
            log.info("%s %s: %s", raw.url, raw.key, error)
            return None
        return out

    def features(self, pictures: Sequence[np.ndarray | None]) -> Iterator[np.ndarray | None]:
        """A feature row for every picture; None for one that could not be used."""
        usable = [picture for picture in pictures if picture is not None]
        rows: Iterator[np.ndarray] = iter(())
        if usable:
            with torch.inference_mode(), self.precision.autocast():
                out = self.model.image(torch.from_numpy(np.stack(usable)).to(self.device))
            rows = iter(out.float().cpu().numpy().astype(self.config.dtype))
        return (None if picture is None else next(rows) for picture in pictures)


def groups(raws: Iterable[RawSample], most: int) -> Iterator[list[RawSample]]:
    """Consecutive samples, at most `most` together, and no more once they have GROUP_BYTES."""
    group: list[RawSample] = []
    held = 0
    for raw in raws:
        group.append(raw)
        held += sum(map(len, raw.members.values()))
        if len(group) == most or held >= GROUP_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _sample(raw: RawSample, row: np.ndarray | None) -> dict[str, str | bytes]:
    """The sample for webdataset's writer: its members except pictures, and its features."""
    left_out = {*IMAGE_TYPES, FEATURES, ""}  # webdataset cannot write a member without an extension
    members = {name: data for name, data in raw.members.items() if name not in left_out}
    if row is not None:
        members[FEATURES] = encoded_row(row)
    elif not members:
        members["missing"] = b""  # the sample keeps its place in the order
    return {**members, "__key__": raw.key}
