"""Evaluates a model on zero-shot classification and retrieval sets, during training and by the `eval` verb.

N: images, M: captions, n: images of a batch, C: classes, G: groups, U: distinct class names, D: feature width.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import open_clip
import torch

from clipscale import __version__
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import cores_of_rank
from clipscale.config.sections import EvalConfig
from clipscale.distributed.world import World
from clipscale.eval import zero_shot
from clipscale.eval.encode import Encoder, join
from clipscale.eval.examples import gallery
from clipscale.eval.retrieval import retrieval_metrics
from clipscale.eval.sets.item import CLASSIFICATION, EvalSet
from clipscale.eval.suites import chosen_sets
from clipscale.models.towers import ClipModel

Results = dict[str, dict[str, float]]
"""Set name -> metric name -> value. Metrics are shares in [0, 1], except the counts `images`, `captions` and `broken`.
`main` is the set's main metric in its suite."""


def check(config: EvalConfig, world: World) -> list[EvalSet]:
    """The sets of `config`, indexed. Training calls it at its start, so a mistyped path is found in the first minute.

    A collective: every rank calls it, and a mistake that one rank finds is raised on all. Raises UserError.
    """
    sets = world.on_all(lambda: chosen_sets(config))
    views = world.gather([(eval_set.label, len(eval_set), len(eval_set.captions)) for eval_set in sets])
    if any(view != views[0] for view in views):
        raise UserError("eval.sets: the nodes see different files; put the sets on storage that all of them share")
    return sets


def evaluate(
    model: ClipModel,
    config: EvalConfig,
    world: World,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    run_dir: Path | None = None,
    step: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    about: dict[str, Any] | None = None,
) -> Results:
    """Metrics of every set, the same on every rank. A collective: every rank calls it.

    Broken images count as misses, so every metric covers all images of its set; the metric `broken` counts them. With
    `run_dir`, rank 0 writes `eval/step_N.json` there after each set, and examples for the report. The model is in
    evaluation mode meanwhile. Sets evaluated with averaged weights, which the caller puts into the model, are named
    `SET (ema)`, parts of sets `SET (limit N)`. `about` is what the caller knows of the results, such as the precision.
    `before_batch()` is called equally often on every rank; what it raises ends the evaluation. `progress(what, done,
    total)` is called after each batch.

    Raises UserError for sets that cannot be used, and OSError where `run_dir` cannot be written.
    """
    sets = check(config, world)
    threads = config.workers or min(8, cores_of_rank())
    encoder = Encoder(model, world, autocast, config.batch, threads, before_batch, progress)
    folder = run_dir if world.main else None
    results: Results = {}
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.train(False)
        for eval_set in sets:
            started = time.perf_counter()
            if eval_set.kind == CLASSIFICATION:
                metrics = _classification(encoder, eval_set)
            else:
                metrics = _retrieval(encoder, eval_set, folder, step)
            if eval_set.metric:
                metrics["main"] = sum(metrics[name] for name in eval_set.metric) / len(eval_set.metric)
            results[eval_set.label] = metrics
            if folder is not None:
                seconds = round(time.perf_counter() - started, 3)
                facts = measured(eval_set, {"batch": config.batch, "seconds": seconds} | (about or {}))
                save_results(folder, step, {eval_set.label: metrics}, {eval_set.label: facts})
    return results


def _classification(encoder: Encoder, eval_set: EvalSet) -> dict[str, float]:
    world, device = encoder.world, encoder.world.device
    C, G = len(eval_set.classnames), max(eval_set.groups, default=-1) + 1
    classes_UD, rows_C = encoder.classes(eval_set)
    counts_3C, counts_3G = (torch.zeros(3, n, dtype=torch.int64, device=device) for n in (C, G))
    predicted_C = torch.zeros(C, dtype=torch.int64, device=device)
    broken = torch.zeros((), dtype=torch.int64, device=device)
    for span, features_nD, usable_n in encoder.images(eval_set):
        targets = torch.tensor(eval_set.labels[span.start : span.stop], device=device, dtype=torch.int64)
        scores_nC = (features_nD @ classes_UD.T)[:, rows_C]
        ranks = zero_shot.target_ranks(scores_nC, targets).masked_fill(~usable_n, C + 5)
        counts_3C += zero_shot.accuracy_counts(ranks, targets, C)
        predicted_C += torch.bincount(scores_nC.argmax(1)[usable_n], minlength=C)
        if eval_set.groups:
            groups = torch.tensor(eval_set.groups[span.start : span.stop], device=device, dtype=torch.int64)
            counts_3G += zero_shot.accuracy_counts(ranks, groups, G)
        broken += (~usable_n).sum()
    counts_3C, counts_3G, predicted_C, broken = (
        world.gather_rows(counts[None]).sum(0) for counts in (counts_3C, counts_3G, predicted_C, broken)
    )
    _refuse_all_broken(eval_set, int(broken))
    metrics = zero_shot.accuracy_metrics(counts_3C)
    if "macro_f1" in eval_set.metric:
        metrics["macro_f1"] = zero_shot.macro_f1(counts_3C, predicted_C)
    if eval_set.groups:
        metrics |= zero_shot.worst_groups(counts_3G)
    return metrics | {"images": len(eval_set), "broken": int(broken)}


def _retrieval(encoder: Encoder, eval_set: EvalSet, folder: Path | None, step: int | None) -> dict[str, float]:
    """The metrics of a retrieval set; writes examples into `folder`. Every rank ranks the whole set."""
    batches = list(encoder.images(eval_set))
    images_ND = join([features for _, features, _ in batches], len(eval_set), encoder.batch, encoder.world)
    usable = [usable.byte() for _, _, usable in batches]
    usable_N = join(usable, len(eval_set), encoder.batch, encoder.world).bool()
    broken = int((~usable_N).sum())
    _refuse_all_broken(eval_set, broken)
    captions_MD = encoder.texts(eval_set.captions)
    owner_M = torch.tensor(eval_set.owner, device=encoder.world.device)
    metrics = retrieval_metrics(images_ND, captions_MD, owner_M, usable_N)
    if folder is not None:
        gallery(eval_set, images_ND, captions_MD, usable_N, folder, step)
    return metrics | {"images": len(eval_set), "captions": len(eval_set.captions), "broken": broken}


def _refuse_all_broken(eval_set: EvalSet, broken: int) -> None:
    if broken == len(eval_set):
        raise UserError(f"eval.sets: none of the {len(eval_set)} images of {eval_set.path} can be read; fetch it again")


def measured(eval_set: EvalSet, about: dict[str, Any]) -> dict[str, Any]:
    """What the results of a set belong to: how much of the set, its prompts, versions, and what the caller knows."""
    facts: dict[str, Any] = {"path": str(eval_set.path), "kind": eval_set.kind, "images": len(eval_set)}
    if eval_set.whole is not None:
        facts |= {"of": eval_set.whole, "chosen": "of each class in proportion"}
    if eval_set.templates:
        digest = hashlib.blake2b("\n".join(eval_set.classnames).encode(), digest_size=16).hexdigest()
        facts |= {"prompts": list(eval_set.templates), "classes": len(eval_set.classnames), "classnames": digest}
    if eval_set.metric:
        facts["main"] = list(eval_set.metric)
    versions = {"clipscale": __version__, "torch": str(torch.__version__), "open_clip": open_clip.__version__}
    return facts | about | {"versions": versions, "time": datetime.now(UTC).isoformat(timespec="seconds")}


def save_results(run_dir: Path, step: int | None, results: Results, about: dict[str, dict[str, Any]]) -> Path:
    """Write `eval/step_N.json`, or `eval/final.json`, where the results of other sets stay. Raises OSError. about: what
    each set's results belong to."""
    path = run_dir / "eval" / ("final.json" if step is None else f"step_{step:08d}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier: dict[str, Any] = {}
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
    record = {"results": earlier.get("results", {}) | results, "measured": earlier.get("measured", {}) | about}
    files.write_json(path, {"step": step} | record)
    return path
