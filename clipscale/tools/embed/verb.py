"""The verb `clipscale embed`. Each shard becomes files of its own in `out`.

    arrays     NAME.image.npy and NAME.text.npy, (samples, D), and NAME.jsonl with the key and caption of each row
    teacher=T  NAME.tar with all members, and KEY.T.npy, (2, D), for `distill.teachers`

features.json says which weights computed the features, and SHARDS_FILE says where each file's samples come from.
Rank r of P takes every P-th shard. D: feature width.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line, tracked
from clipscale.config.conditions import source_names
from clipscale.config.model import ModelConfig
from clipscale.config.secrets import text_without_secrets
from clipscale.config.setting import differences
from clipscale.data.addresses import basename, is_local, without_query
from clipscale.data.sample import IMAGE_TYPES, size_limits_of
from clipscale.data.shards.features import FEATURES_FILE, TeacherNote, encoded_array, notes_beside, one_of_each_folder
from clipscale.data.shards.index import scan_shard
from clipscale.data.shards.listing import list_shards
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.shard_errors import SourceError
from clipscale.data.shards.writer import shard_writer
from clipscale.distributed.agreement import run_long_on_rank0
from clipscale.distributed.join import destroy_world, init_world
from clipscale.launch import local
from clipscale.models.towers import ClipModel
from clipscale.tools.embed.arrays import SHARDS_FILE, FeaturesNote, ShardEntry, array_path
from clipscale.tools.embed.feature_encoder import FeatureEncoder, Group, feature_encoder
from clipscale.tools.embed.settings import SIDES, EmbedConfig, check_embed
from clipscale.tools.trained_model import load_run_or_weights

log = logging.getLogger(__name__)

# A file in `out` that a command locks while it changes the records.
LOCK_FILE = ".embed.lock"
# The format of plain arrays. Any other format is the name of a teacher.
ARRAYS = "features"
# Reasons that lie in the shard itself, so that another try would not help. The others lie in the network or the server.
DAMAGED_SHARD = ("truncated_shard", "unreadable_shard")


class EmbedResult(TypedDict):
    """The folder of features, and the samples that were embedded."""

    out: str
    samples: int


def main(config: EmbedConfig) -> EmbedResult:
    """Write features on `launch.procs` processes, or as one of torchrun's."""
    return cast(EmbedResult, local.launch(config, f"{__name__}:work"))


def work(config: EmbedConfig) -> EmbedResult:
    """Do one process's part. Raises UserError."""
    world = init_world(config.device, config.launch.timeout_s)
    out = Path(config.out).expanduser()
    try:
        torch.manual_seed(0)
        run = check_embed(config)
        model, settings, _ = load_run_or_weights(
            run, config.which, config.weights, config.model, partial(run_long_on_rank0, world)
        )
        sources = run_long_on_rank0(world, lambda: write_note(config, out, features_note(config, model, settings)))
        encoder = feature_encoder(model, world.device, config.precision, config.data)
        share = list(sources.items())[world.rank :: world.size]
        shown = tracked(share, "embedding shards", len(share))
        results = world.all_gather_object({name: embed_shard(encoder, config, url, out / name) for name, url in shown})
    finally:
        destroy_world()
    entries = {name: entry for result in results for name, entry in result.items() if entry}
    samples = sum(entry["samples"] for entry in entries.values())
    if world.is_rank0:
        with locked(out):
            write_shards_file(out, {**read(out / SHARDS_FILE), **entries})
        empty = [entry["source"] for entry in entries.values() if not entry["samples"]]
        none = f"; {len(empty)} of {len(sources)} shards have none, such as {empty[0]}" if empty else ""
        train = f"; train with data.train={out} distill.teachers={config.teacher}" if config.teacher else ""
        print_line(f"features of {samples} samples: {out}{none}{train}")
    unread = len(sources) - len(entries)
    if unread:
        raise UserError(f"out={out}: {unread} of {len(sources)} shards could not be fetched; start again to fetch them")
    return {"out": str(out), "samples": samples}


def features_note(config: EmbedConfig, model: ClipModel, settings: ModelConfig) -> FeaturesNote:
    """The description of the features; see `FeaturesNote`."""
    note: FeaturesNote = {
        "model": settings.name,
        "weights": model.image.digest(),
        "width": model.width,
        "dtype": config.dtype,
        "image_size": model.image_size,
        "mean": list(model.pixels.mean),
        "std": list(model.pixels.std),
        "resize": model.pixels.resize_mode,
        "interpolation": model.pixels.interpolation,
        "text": model.text.digest(),
        "captions": source_names(config.data.captions),
    }
    if config.teacher:
        note["scale"] = model.logit_scale.exp().item()
    return note


def write_note(config: EmbedConfig, out: Path, note: FeaturesNote) -> dict[str, str]:
    """Write the note, and of which shard each file will be. Returns the shards by the names of their files in `out`.

    Other commands may write into `out` meanwhile: the records are read and written at the end, in one go.

    Raises UserError where two shards have one name, or where `out` has features of another kind or from elsewhere.
    """
    shards = shards_by_name(config, out)
    others = other_teachers(config, shards.values()) if config.teacher else {}
    format_name = config.teacher or ARRAYS
    with locked(out):
        entries = read(out / SHARDS_FILE)
        for name, url in shards.items():
            check_source(out, name, str(entries.setdefault(name, {"source": plain_address(url)}).get("source")), url)
        notes = read(out / FEATURES_FILE)
        if notes:
            for name, (before, now) in differences(notes.pop(format_name, {}), note).items():
                difference = f"{name}: {str(before)[:80]}, not {str(now)[:80]}"
                raise UserError(f"out={out}: holds features of another kind ({difference}); choose another folder")
            # files of an earlier command have no features of other teachers than it noted
            others = common_notes(others, notes, f"out={out}: {out}", "these shards")
        files.write_json(out / FEATURES_FILE, {**others, format_name: note})
        write_shards_file(out, entries)  # before any work: a start after a kill then knows whose files are there
    return shards


def shards_by_name(config: EmbedConfig, out: Path) -> dict[str, str]:
    """The shards, by the names of their files in `out`. Raises UserError where two have one name."""
    shards: dict[str, str] = {}
    for url in list_shards(config.data)[0]:
        name = basename(url).partition(".tar")[0] + (".tar" if config.teacher else ".jsonl")
        check_source(out, name, plain_address(shards.setdefault(name, url)), url)
        if is_local(url) and Path(url).expanduser().parent.resolve() == out.resolve():
            raise UserError(f"out={out}: data.train has shards there; choose another folder")
    return shards


def check_source(out: Path, name: str, source: str, url: str) -> None:
    """Raise UserError if the file `name` is of another shard than the one at `url`."""
    if source != plain_address(url):
        raise UserError(
            f"out={out}: {name} is of {source} and of {plain_address(url)}; choose an out=DIR for each source"
        )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder, and change its records while no other command does."""
    out.mkdir(parents=True, exist_ok=True)
    with files.locked(out / LOCK_FILE):
        yield


def other_teachers(config: EmbedConfig, shards: Iterable[str]) -> dict[str, TeacherNote]:
    """The notes of the other teachers whose features all folders of the shards have.

    Raises UserError where two notes of a teacher differ: one folder cannot say both.
    """
    first, *rest = one_of_each_folder(shards)
    common = notes_beside(first)
    common.pop(config.teacher, None)
    for url in rest:
        common = common_notes(common, notes_beside(url), f"out={config.out}: {url}", first)
    return common


def common_notes(
    notes: Mapping[str, TeacherNote], others: Mapping[str, object], place: str, first: str
) -> dict[str, TeacherNote]:
    """The notes of teachers that both have. Raises UserError where two of a teacher differ.

    `place` and `first` name in its message where `others` and `notes` are from.
    """
    for name in notes.keys() & others.keys():
        if notes[name] != others[name]:
            raise UserError(f"{place} has features of another {name} than {first}; choose an out=DIR for each")
    return {name: note for name, note in notes.items() if name in others}


def write_shards_file(out: Path, entries: Mapping[str, Mapping[str, object]]) -> None:
    files.write_json(out / SHARDS_FILE, dict(sorted(entries.items())))


def read(path: Path) -> dict[str, dict[str, object]]:
    """The entries of a file in `out`, by name; none if it is not there. Raises UserError."""
    with files.damage_to_user_error("out", path, "remove this file and start again; the arrays stay"):
        content = files.read_json(path) if path.is_file() else {}
        return {name: dict(entry) for name, entry in content.items()}


def plain_address(url: str) -> str:
    """A shard's address without secrets."""
    return text_without_secrets(str(Path(url).expanduser().absolute()) if is_local(url) else without_query(url))


def embed_shard(encoder: FeatureEncoder, config: EmbedConfig, url: str, path: Path) -> ShardEntry | None:
    """Write one shard's features completely or not at all, unless they are there. Returns its entry in SHARDS_FILE.

    A damaged shard is written as far as it can be read, because another try would not help. None for one that could not
    be fetched.
    """
    if not path.is_file():
        try:
            groups = shard_groups(encoder, config, url)
            if config.teacher:
                write_tar(path, groups, config.teacher)
            else:
                write_npy(path, groups)
        except SourceError:
            return None
    samples = scan_shard(str(path)).samples if config.teacher else len(path.read_bytes().splitlines())
    return {"source": plain_address(url), "samples": samples}


def shard_groups(encoder: FeatureEncoder, config: EmbedConfig, url: str) -> Iterator[Group]:
    """A shard's samples with their features; for a teacher, with all members.

    Raises SourceError for a shard that could not be fetched.
    """
    problem = ReadFailure()
    captions = {source.partition(":")[0] for source in encoder.captions}
    kinds = None if config.teacher else size_limits_of(IMAGE_TYPES, captions)
    raw_samples = read_shard(url, problem, size_limits=kinds)
    missing = samples = 0
    for group in encoder.groups(raw_samples, config.batch, config.dtype):
        samples += len(group.raw_samples)
        missing += int(np.isnan(group.rows).all(2).any(1).sum())
        yield group
    if missing:
        log.warning(
            "%d of %d samples without a usable picture or text in %s", missing, samples, text_without_secrets(url)
        )
    if problem.reason:
        log.warning("%s after %d samples: %s", problem.reason, samples, problem.detail)
        if problem.reason not in DAMAGED_SHARD:
            raise SourceError(problem.reason, problem.detail)


def write_npy(path: Path, groups: Iterable[Group]) -> None:
    """Write the arrays, then NAME.jsonl, which says that they are complete."""
    rows = []
    lines = []
    for group in groups:
        rows.append(group.rows)
        for raw, caption in zip(group.raw_samples, group.captions):
            lines.append(json.dumps({"key": raw.key, "caption": caption}) + "\n")
    for number, side in enumerate(SIDES):
        with files.replacing(array_path(path, side)) as file:
            np.save(file, np.concatenate([array[:, number] for array in rows]) if rows else np.empty((0, 0)))
    files.write_text(path, "".join(lines))


def write_tar(path: Path, groups: Iterable[Group], teacher: str) -> None:
    """Write all samples with their members. A sample that lacks one of the two features is written without both."""
    member = f"{teacher}.npy"
    with shard_writer(path) as writer:
        for group in groups:
            for raw, features in zip(group.raw_samples, group.rows):
                members = {name: data for name, data in raw.members.items() if name not in ("", member)}
                if not np.isnan(features).any():
                    members[member] = encoded_array(features)
                writer.write({**(members or {"missing": b""}), "__key__": raw.key})
