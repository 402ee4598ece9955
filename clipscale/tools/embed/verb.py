"""The verb `clipscale embed`. Each shard becomes files of its own in `out`.

    arrays     NAME.image.npy and NAME.text.npy, (samples, D), and NAME.jsonl with the key and caption of each row
    teacher=T  NAME.tar with all members, and KEY.T.npy, (2, D), for `distill.teachers`

features.json says which weights computed the features, and SHARDS_FILE says where each file's samples come from.
Rank r of P takes every P-th shard. D: feature width.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line, tracked
from clipscale.config.secrets import text_without_secrets
from clipscale.data.sample import IMAGE_TYPES, size_limits_of
from clipscale.data.shards.features import encoded_array
from clipscale.data.shards.index import scan_shard
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.requests import SourceError
from clipscale.data.shards.writer import shard_writer
from clipscale.distributed.agreement import run_on_rank0_with_heartbeat
from clipscale.distributed.join import destroy_world, init_world
from clipscale.launch import local
from clipscale.tools.embed.arrays import ShardEntry, array_path
from clipscale.tools.embed.feature_encoder import FeatureEncoder, Group, feature_encoder
from clipscale.tools.embed.notes import add_entries, features_note, plain_address, write_note
from clipscale.tools.embed.settings import SIDES, EmbedConfig, check_embed
from clipscale.tools.trained_model import load_run_or_weights

log = logging.getLogger(__name__)

# Reasons that lie in the shard itself, so that another try would not help. The others lie in the network or the server.
DAMAGED_SHARD = ("truncated_shard", "unreadable_shard")


class EmbedResult(TypedDict):
    """The folder of features, and the samples that were embedded."""

    out: str
    samples: int


def main(config: EmbedConfig) -> EmbedResult:
    """Write features on `launch.procs` processes, or as one of torchrun's."""
    return local.launch(config, work)


def work(config: EmbedConfig) -> EmbedResult:
    """Do one process's part. Raises UserError."""
    world = init_world(config.device, config.launch.timeout_s)
    out = Path(config.out).expanduser()
    try:
        torch.manual_seed(0)
        run = check_embed(config)
        model, settings, _ = load_run_or_weights(
            run, config.which, config.weights, config.model, partial(run_on_rank0_with_heartbeat, world)
        )
        sources = run_on_rank0_with_heartbeat(
            world, lambda: write_note(config, out, features_note(config, model, settings))
        )
        encoder = feature_encoder(model, world.device, config.precision, config.data)
        share = list(sources.items())[world.rank :: world.size]
        shown = tracked(share, "embedding shards", len(share))
        results = world.all_gather_object({name: embed_shard(encoder, config, url, out / name) for name, url in shown})
    finally:
        destroy_world()
    entries = {name: entry for result in results for name, entry in result.items() if entry}
    samples = sum(entry["samples"] for entry in entries.values())
    if world.is_rank0:
        add_entries(out, entries)
        empty = [entry["source"] for entry in entries.values() if not entry["samples"]]
        none = f"; {len(empty)} of {len(sources)} shards have none, such as {empty[0]}" if empty else ""
        train = f"; train with data.train={out} distill.teachers={config.teacher}" if config.teacher else ""
        print_line(f"features of {samples} samples: {out}{none}{train}")
    unread = len(sources) - len(entries)
    if unread:
        raise UserError(f"out={out}: {unread} of {len(sources)} shards could not be fetched; start again to fetch them")
    return {"out": str(out), "samples": samples}


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
    size_limits = None if config.teacher else size_limits_of(IMAGE_TYPES, captions)
    raw_samples = read_shard(url, problem, size_limits=size_limits)
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
