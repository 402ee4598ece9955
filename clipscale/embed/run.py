"""Writes the features of all shards, or tables, on all processes.

Each shard, or some thousand rows of a table, has a file of its own. Rank r takes every world-size-th shard.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.config.secrets import hidden
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import IMAGE, TEXT, EmbedConfig, check_embed
from clipscale.data.decode import IMAGE_TYPES
from clipscale.data.sample import limits
from clipscale.data.shards.access import SourceError, is_local, leaf_of, scheme_of, unsigned
from clipscale.data.shards.listing import access_of, list_shards
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.data.shards.tables import part_of
from clipscale.data.shards.writer import write_counts
from clipscale.distributed import world as distributed
from clipscale.distributed.world import World
from clipscale.embed.encode import FeatureEncoder, Group
from clipscale.embed.formats import FORMATS
from clipscale.embed.note import SHARDS, features_note, write_note
from clipscale.launch import local
from clipscale.launch.run_lock import RunLock
from clipscale.models.towers import ClipModel, load_any
from clipscale.step.precision import Precision

log = logging.getLogger(__name__)

DAMAGED = ("truncated_shard", "unreadable_shard")
"""Reasons that lie in the shard itself, and stay. The others lie in the network or the server."""


def embed(config: EmbedConfig) -> dict[str, Any]:
    """Write features to `out`, on `launch.procs` processes or as one of torchrun's. Returns its folder and samples. Raises UserError."""
    task = "clipscale.embed.run:work"
    return local.run(config, task)


def work(config: EmbedConfig) -> dict[str, Any]:
    """One process's part. Raises UserError."""
    world = distributed.start(config.device, config.launch.threads, config.launch.timeout_s)
    lock = RunLock(Path(config.out).expanduser(), "out")
    try:
        sources = world.on_main(lambda: _sources(config))
        return _write(config, sources, world, lock)
    finally:
        lock.release()
        distributed.stop()


def _sources(config: EmbedConfig) -> dict[str, str]:
    """The shards by the names of their files in `out`. Raises UserError."""
    urls, _ = list_shards(config.data)
    out = Path(config.out).expanduser().resolve()
    names = [_name(url) + FORMATS[config.format].end for url in urls]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(
            f"data.train: two shards are called {twice[0]}; take sources one at a time, each with an out=DIR of its own"
        )
    if any(is_local(url) and Path(url).expanduser().parent.resolve() == out for url in urls):
        raise UserError(
            f"out={config.out}: data.train has shards there, which would be overwritten; choose another folder"
        )
    return dict(zip(names, urls))


def _name(url: str) -> str:
    """The name of a shard, or of a part of a table or of a folder of pictures."""
    if scheme_of(url) != "table":
        return leaf_of(url).partition(".tar")[0]
    part = part_of(url)
    stem = Path(part.root).name if part.sidecar else leaf_of(part.path).rpartition(".")[0]
    return f"{stem}-{part.first:09d}"


def _write(config: EmbedConfig, sources: dict[str, str], world: World, lock: RunLock) -> dict[str, Any]:
    model, settings = _model(config, world)
    folder = Path(config.out).expanduser()
    tables = any(scheme_of(url) == "table" for url in sources.values())
    write_note(folder, features_note(config, model, settings, tables=tables), world, lock)
    precision = Precision(config.precision, world.device)
    for tower in [model.image] * (IMAGE in config.kinds) + [model.text] * (TEXT in config.kinds):
        precision.convert(tower.to(world.device))
    earlier = world.on_main(lambda: _entries(config, folder, sources))
    writer = _Writer(config, FeatureEncoder(config, model, precision, world.device), folder, earlier)
    own = {name: writer.shard(sources[name], name) for name in list(sources)[world.rank :: world.size]}
    entries = {name: entry for part in world.gather(own) for name, entry in part.items() if entry is not None}
    samples = sum(entry["samples"] for entry in entries.values())
    unread = [problem for part in world.gather(writer.unread) for problem in part]
    if world.main:
        with files.reported(f"out={folder}", folder / SHARDS, "free disk space, or make it writable, and start again"):
            listed = dict(sorted((earlier | entries).items()))
            files.write_json(folder / SHARDS, listed)
            if config.format == "webdataset":
                write_counts(folder, {name: one["samples"] for name, one in listed.items() if name.endswith(".tar")})
        missing = {kind: sum(entry["missing"][kind] for entry in entries.values()) for kind in config.kinds}
        lost = "".join(f", {count} without features of their {kind}" for kind, count in missing.items() if count)
        trains = config.format == "webdataset" and IMAGE in config.kinds
        remedy = f"; train with data.train={folder} data.image_features=true" if trains else ""
        say(f"features of {samples} samples{lost}: {folder}{remedy}")
    if unread:
        raise UserError(
            f"out={folder}: {len(unread)} of {len(sources)} shards could not be fetched and are not written (the first: "
            f"{unread[0]}); start again to fetch them"
        )
    return {"out": str(folder), "samples": samples}


def _model(config: EmbedConfig, world: World) -> tuple[ClipModel, ModelConfig]:
    """The model and its settings. Raises UserError."""
    run = check_embed(config)
    torch.manual_seed(config.seed)
    model, settings, _ = load_any(run, config.checkpoint, config.weights, config.model, world, hub=config.hub)
    kinds = [kind for kind in config.kinds if not (run or settings.weights or getattr(settings, kind).weights)]
    if world.main and kinds:
        log.warning(
            "these are features of random weights, by seed=%d; give model.%s.weights=PATH", config.seed, kinds[0]
        )
    return model, settings


def _entries(config: EmbedConfig, folder: Path, sources: dict[str, str]) -> dict[str, Any]:
    """What earlier starts have noted in SHARDS. Raises UserError if a file there has another source now."""
    with files.reported(f"out={folder}", folder / SHARDS, "make it readable, or choose another folder"):
        found = files.read_tree(folder / SHARDS) if (folder / SHARDS).is_file() else {}
        if not all(isinstance(entry, dict) and isinstance(entry.get("samples"), int) for entry in found.values()):
            raise ValueError("an entry is missing or of another type")
    for name, url in sources.items():
        source = found.get(name, {}).get("source")
        if source not in (None, _source(url)) and (folder / name).is_file():
            raise UserError(
                f"out={folder}: {name} has the features of {source}, not of {_source(url)}; choose another folder, or if the shard "
                f"has moved, remove the entry from {SHARDS}"
            )
    return found


def _source(url: str) -> str:
    """A shard's address without secrets."""
    return hidden(str(Path(url).expanduser().absolute()) if is_local(url) else unsigned(url))


def _counts(value: Any, kinds: Sequence[str]) -> bool:
    """Whether a value from a file is a count of each kind."""
    return isinstance(value, dict) and value.keys() == set(kinds) and all(type(n) is int for n in value.values())


@dataclass
class _Writer:
    """Writes shards on one rank."""

    config: EmbedConfig
    encoder: FeatureEncoder
    folder: Path
    earlier: Mapping[str, dict[str, Any]]
    """The entries of earlier starts in SHARDS."""
    unread: list[str] = field(default_factory=list)
    """Why shards could not be fetched, one line each."""

    def shard(self, url: str, name: str) -> dict[str, Any] | None:
        """Write one shard's features completely or not at all, unless they are there. Its entry; None if it could not be fetched.

        A damaged shard is written as far as it can be read: it will not get better. A shard that could not be fetched is left out,
        so that the next start fetches it again.
        """
        path, kinds, form = self.folder / name, self.config.kinds, FORMATS[self.config.format]
        written = not path.is_file()
        if written:
            try:
                form.write(path, self.groups(url), kinds)
            except SourceError as error:
                self.unread.append(str(error))
                return None
            except OSError as error:
                raise UserError(
                    f"out={self.folder}: {name} cannot be written ({error.strerror}); free disk space and start again"
                ) from error
        with files.reported(f"out={self.folder}", path, "remove it, and start again"):
            entry = {"source": _source(url), "samples": form.count(path)}
            earlier = self.earlier.get(name, {})
            missing = earlier.get("missing")
            if written or earlier != {**entry, "missing": missing} or not _counts(missing, kinds):
                missing = form.missing(path, kinds)  # the list is of before a kill, or of an older version
        if written:
            say(f"{path}: {entry['samples']} samples")
        return {**entry, "missing": missing}

    def groups(self, url: str) -> Iterator[Group]:
        """A shard's samples with their features. Raises SourceError for a shard that could not be fetched."""
        problem, data = ReadProblem(), self.config.data
        captions = {source.partition(":")[0] for source in self.encoder.sources}
        kinds = None if FORMATS[self.config.format].all_members else limits(IMAGE_TYPES, captions, data.max_bytes)
        written = 0
        for group in self.encoder.groups(read_shard(url, problem, kinds=kinds, store=Store(access_of(data)))):
            written += len(group.raws)
            yield group
        if problem.reason:
            log.warning("%s after %d samples: %s", problem.reason, written, problem.detail)
            if problem.reason not in DAMAGED:
                raise SourceError(problem.reason, problem.detail)
