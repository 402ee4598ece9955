"""Evaluates a model on zero-shot classification and retrieval sets, during training and by the `eval` verb.

N: images, M: captions, n: images of a batch, C: classes, D: feature width.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.common.hardware import cores_of_rank
from clipscale.config.checks import check_values
from clipscale.config.sections import EvalConfig
from clipscale.distributed.world import World
from clipscale.eval import probe, retrieval, zero_shot
from clipscale.eval.encode import Encoder, join
from clipscale.eval.examples import Examples, gallery, misses
from clipscale.eval.results import Results, StoredResults
from clipscale.eval.sets import compositional
from clipscale.eval.sets.item import CLASSIFICATION, RETRIEVAL, EvalSet
from clipscale.eval.sets.load import probes
from clipscale.eval.suites import chosen_sets
from clipscale.models.towers import ClipModel, weights_digest

log = logging.getLogger(__name__)


def check(config: EvalConfig, world: World) -> list[EvalSet]:
    """The sets of `config`, indexed. Training calls it at its start, so a mistyped path is found in the first minute.

    A collective: every rank calls it, and a mistake that one rank finds is raised on all. Raises UserError.
    """

    def indexed() -> list[EvalSet]:
        check_values(config, "eval.")
        sets = chosen_sets(config)
        return sets + probes(sets, config.shots)

    sets = world.on_all(indexed)
    views = world.gather([(item.label(), len(item), len(item.captions)) for item in sets])
    if any(view != views[0] for view in views):
        raise UserError("eval.sets: the nodes see different files; put the sets on storage that all of them share")
    return sets


def evaluate(
    model: ClipModel,
    config: EvalConfig,
    world: World,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    run_dir: Path | None = None,
    step: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
    about: dict[str, Any] | None = None,
    reuse: bool = False,
    keep_newer: bool = False,
) -> Results:
    """Metrics of every set, the same on every rank. A collective: every rank calls it.

    Broken images count as misses, so every metric covers all images of its set; the metric `broken` counts them. With `run_dir`, rank 0
    writes `eval/step_N.json` and the retrieved examples there. The model is in evaluation mode meanwhile, and put back afterwards. Sets
    evaluated with averaged weights, which the caller puts into the model, are named `SET (ema)`, parts of sets `SET (limit N)`. `about`
    is what the caller knows of the figures, such as the precision; it is kept beside them. `reuse`: figures that are stored already are
    not computed again. `keep_newer`: misses and galleries of a later step stay in place of this one's. `before_batch()` is called equally
    often on every rank; what it raises ends the evaluation.

    Raises UserError for sets that cannot be used.
    """
    marks = ("ema",) if config.weights == "ema" else ()
    sets = [replace(item, marks=(*item.marks, *marks)) for item in check(config, world)]
    threads = config.workers or min(8, cores_of_rank())
    encoder = Encoder(model, world, autocast, config.batch, threads, before_batch, pictures=run_dir is not None)
    records: StoredResults | None = None
    if run_dir is not None and sets:
        facts = {"weights": weights_digest(model), "averaged": config.weights == "ema", "batch": config.batch}
        records = StoredResults(run_dir, step, sets, facts | (about or {}), keep_newer)
    known = world.on_main(records.known) if records and reuse else {}
    results: Results = {}
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.train(False)
        for item in sets:
            labels = {part: item.label(part) for part in item.parts}
            if known.keys() >= {*labels.values()}:
                results |= {label: known[label] for label in labels.values()}
                continue
            started = time.perf_counter()
            parts, pictures = _evaluated(encoder, item, step)
            found = {label: parts[part] for part, label in labels.items()}
            if records and world.main:
                records.save(found, time.perf_counter() - started, pictures)
            results |= found
    return results


def _evaluated(encoder: Encoder, item: EvalSet, step: int | None) -> tuple[Results, Examples | None]:
    """The metrics of each part of a set, and under the name "" those of the set; on rank 0 what the report shows."""
    pictures: Examples | None = None
    if item.train is not None:
        parts = {"": probe.metrics(encoder, item, item.train)}
    elif item.kind == CLASSIFICATION:
        parts, pictures = _classification(encoder, item, step)
    elif item.kind == RETRIEVAL:
        parts, pictures = _retrieval(encoder, item, step)
    else:
        parts = _composition(encoder, item)
    for metrics in parts.values():
        if item.metric and all(name in metrics for name in item.metric):
            metrics["main"] = sum(metrics[name] for name in item.metric) / len(item.metric)
    return parts, pictures


def _classification(encoder: Encoder, item: EvalSet, step: int | None) -> tuple[Results, Examples | None]:
    world, device, C, G = encoder.world, encoder.world.device, len(item.classnames), max(item.groups, default=-1) + 1
    classes_UD, rows_C = encoder.classes(item)
    counts_3C, counts_3G = (torch.zeros(3, n, dtype=torch.int64, device=device) for n in (C, G))
    predicted_C = torch.zeros(C, dtype=torch.int64, device=device)
    broken = torch.zeros((), dtype=torch.int64, device=device)
    answers: list[tuple[Tensor, Tensor]] = []
    for span, features_nD, usable_n in encoder.images(item):
        targets = torch.tensor(item.labels[span.start : span.stop], device=device, dtype=torch.int64)
        scores_nC = (features_nD @ classes_UD.T)[:, rows_C]
        ranks = zero_shot.target_ranks(scores_nC, targets).masked_fill(~usable_n, C + 5)
        counts_3C += zero_shot.accuracy_counts(ranks, targets, C)
        best_n, predicted_n = scores_nC.max(1)
        predicted_C += torch.bincount(predicted_n[usable_n], minlength=C)
        margin_n = best_n - scores_nC.gather(1, targets[:, None])[:, 0]
        answers.append((predicted_n, margin_n.masked_fill(~usable_n, torch.nan)))
        if item.groups:
            groups = torch.tensor(item.groups[span.start : span.stop], device=device, dtype=torch.int64)
            counts_3G += zero_shot.accuracy_counts(ranks, groups, G)
        broken += (~usable_n).sum()
    counts_3C, predicted_C, broken = (world.gather_rows(one[None]).sum(0) for one in (counts_3C, predicted_C, broken))
    _refuse_all_broken(item, int(broken))
    metrics = zero_shot.accuracy_metrics(counts_3C)
    if "macro_f1" in item.metric:
        metrics["macro_f1"] = zero_shot.macro_f1(counts_3C, predicted_C)
    if item.groups:
        metrics |= zero_shot.worst_groups(world.gather_rows(counts_3G[None]).sum(0))
    if item.inliers is not None:
        metrics["aupr"] = _outliers(encoder, item, item.inliers, classes_UD)
    predicted_N, margin_N = (join(list(parts), len(item), encoder.batch, world) for parts in zip(*answers))
    missed = misses(step, item, counts_3C, predicted_N, margin_N) if world.main and encoder.pictures else None
    return {"": metrics | {"images": len(item), "broken": int(broken)}}, missed


def _outliers(encoder: Encoder, item: EvalSet, inliers: EvalSet, classes_UD: Tensor) -> float:
    """Area under the precision-recall curve with the images of `item` as positives and those of `inliers` as negatives.

    The score of an image is minus its largest class probability (Hendrycks et al. 2021, Natural Adversarial Examples). A broken
    image counts against the model.
    """
    scale = encoder.model.logit_scale.exp()
    scores = []
    for one, missed in ((item, -torch.inf), (inliers, torch.inf)):
        parts = []
        for _, features_nD, usable_n in encoder.images(one):
            likely_n = (scale * features_nD @ classes_UD.T).softmax(1).amax(1)
            parts.append((-likely_n).masked_fill(~usable_n, missed))
        scores.append(join(parts, len(one), encoder.batch, encoder.world))
    positive = torch.arange(len(item) + len(inliers), device=scores[0].device) < len(item)
    return zero_shot.average_precision(torch.cat(scores), positive)


def _encoded(encoder: Encoder, item: EvalSet) -> tuple[Tensor, Tensor, Tensor]:
    """Features of all images (N, D) and captions (M, D), and which images could be decoded (N,), on every rank."""
    batches = list(encoder.images(item))
    images_ND = join([features for _, features, _ in batches], len(item), encoder.batch, encoder.world)
    usable_N = join([usable.byte() for _, _, usable in batches], len(item), encoder.batch, encoder.world).bool()
    _refuse_all_broken(item, int((~usable_N).sum()))
    return images_ND, encoder.texts(item.captions), usable_N


def _retrieval(encoder: Encoder, item: EvalSet, step: int | None) -> tuple[Results, Examples | None]:
    images_ND, captions_MD, usable_N = _encoded(encoder, item)
    owner_M = torch.tensor(item.owner, device=encoder.world.device)
    parts = {}
    for part in item.parts[1:] or [""]:
        chosen = torch.tensor([one == part for one in item.part_of], device=owner_M.device) if part else slice(None)
        parts[part] = _ranked(images_ND, captions_MD[chosen], owner_M[chosen], usable_N, encoder.world)
    pictures = gallery(step, item, images_ND, captions_MD, usable_N) if encoder.world.main else None
    counts = {"images": len(item), "captions": len(item.captions), "broken": int((~usable_N).sum())}
    return _with_mean(parts, counts), pictures


def _with_mean(parts: Results, counts: dict[str, int]) -> Results:
    """The metrics of the parts, preceded by their means, with the counts of the whole set."""
    if "" in parts:
        return parts
    every = list(parts.values())
    return {"": {name: sum(metrics[name] for metrics in every) / len(every) for name in every[0]} | counts} | parts


def _ranked(
    images_ND: Tensor, captions_MD: Tensor, owner_M: Tensor, usable_N: Tensor, world: World
) -> dict[str, float]:
    """Retrieval among the images that have captions. A broken image and its captions are misses; the others are ranked without them."""
    captioned_N = torch.bincount(owner_M, minlength=len(usable_N)) > 0
    ranked_N, kept_M = captioned_N & usable_N, usable_N[owner_M]
    images, broken = int(captioned_N.sum()), int((captioned_N & ~usable_N).sum())
    new_index_N = ranked_N.long().cumsum(0) - 1
    image_ranks, caption_ranks = retrieval.retrieval_ranks(
        images_ND[ranked_N], captions_MD[kept_M], new_index_N[owner_M[kept_M]], world=world
    )
    missed_ranks = torch.full((max(images, len(owner_M)),), retrieval.UNREACHABLE, device=owner_M.device)
    metrics = retrieval.retrieval_metrics(
        torch.cat([image_ranks, missed_ranks[:broken]]),
        torch.cat([caption_ranks, missed_ranks[: int((~kept_M).sum())]]),
    )
    return metrics | {"images": images, "captions": len(owner_M), "broken": broken}


def _composition(encoder: Encoder, item: EvalSet) -> Results:
    images_ND, captions_MD, usable_N = _encoded(encoder, item)
    part_of = item.part_of or [""] * len(item.questions)
    parts: Results = {}
    for part in dict.fromkeys(part_of):
        questions = [question for question, one in zip(item.questions, part_of) if one == part]
        broken = len({i for question in questions for i in question.images if not usable_N[i]})
        scores = compositional.scores(questions, images_ND, captions_MD, usable_N)
        parts[part] = scores | {"questions": len(questions), "broken": broken}
    return _with_mean(parts, {"questions": len(item.questions), "broken": int((~usable_N).sum())})


def _refuse_all_broken(item: EvalSet, broken: int) -> None:
    if broken == len(item):
        raise UserError(f"eval.sets: none of the {len(item)} images of {item.path} can be decoded; fetch the set again")
