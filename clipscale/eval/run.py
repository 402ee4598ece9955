"""Evaluates a model on zero-shot classification and retrieval sets, during training and by the `eval` verb.

N: images, M: captions, n: images of a batch, C: classes, D: feature width.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from clipscale.config.checks import check_values
from clipscale.config.sections import EvalConfig
from clipscale.distributed import World
from clipscale.errors import UserError
from clipscale.eval import retrieval, zero_shot
from clipscale.eval.encode import Encoder, join
from clipscale.eval.examples import save_examples
from clipscale.eval.results import Results, known_results, measured, save_results, weights_digest
from clipscale.eval.sets.item import RETRIEVAL, EvalSet
from clipscale.eval.sets.load import load_sets
from clipscale.hardware import cores_of_rank
from clipscale.models.towers import ClipModel

log = logging.getLogger(__name__)


def check(config: EvalConfig, world: World) -> list[EvalSet]:
    """The sets of `config`, indexed. Training calls it at its start, so a mistyped path is found in the first minute.

    A collective: every rank calls it, and a mistake that one rank finds is raised on all. Raises UserError.
    """
    sets, problem = [], ""
    try:
        check_values(config, "eval.")
        sets = load_sets(config.sets, config.limit)
    except UserError as error:
        problem = str(error)
    view = (problem, [(s.name, len(s), len(s.captions)) for s in sets])
    views = world.gather(view)
    problems = [problem for problem, _ in views if problem]
    if problems:
        raise UserError(problems[0])
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
) -> Results:
    """Metrics of every set, the same on every rank. A collective: every rank calls it.

    Broken images count as misses, so every metric covers all images of its set; the metric `broken` counts them. With `run_dir`, rank 0
    writes `eval/step_N.json` and the retrieved examples there. The model is in evaluation mode meanwhile, and put back afterwards. Sets
    evaluated with averaged weights, which the caller puts into the model, are named `SET (ema)`, parts of sets `SET (limit N)`. `about`
    is what the caller knows of the figures, such as the precision; it is kept beside them. `reuse`: figures that are stored already are
    not computed again. `before_batch()` is called equally often on every rank; what it raises ends the evaluation.

    Raises UserError for sets that cannot be used.
    """
    sets = check(config, world)
    threads = config.workers or min(8, cores_of_rank())
    encoder = Encoder(model, world, autocast, config.batch, threads, before_batch)
    named = {item.name: f"{item.name} (ema)" if config.weights == "ema" else item.name for item in sets}
    records: dict[str, dict[str, Any]] = {}
    if run_dir is not None and sets:
        facts = {"weights": weights_digest(model), "averaged": config.weights == "ema", "batch": config.batch}
        records = {named[item.name]: measured(item, facts | (about or {})) for item in sets}
    known: Results = {}
    if reuse and run_dir is not None:
        known = world.on_main(lambda: known_results(run_dir, step, records))
    results: Results = {}
    training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for item in sets:
                name, started = named[item.name], time.perf_counter()
                if name in known:
                    results[name] = known[name]
                    continue
                if item.kind == RETRIEVAL:
                    results[name] = _retrieval(encoder, item, run_dir, step)
                else:
                    results[name] = _classification(encoder, item)
                if run_dir is not None and world.main:
                    seconds = time.perf_counter() - started
                    _save(run_dir, step, {name: results[name]}, seconds, {name: records[name]})
    finally:
        model.train(training)
    return results


def _save(run_dir: Path, step: int | None, results: Results, seconds: float, about: dict[str, dict[str, Any]]) -> None:
    """Write the figures of a set as soon as they are known: an evaluation that is stopped keeps them."""
    try:
        save_results(run_dir, step, results, seconds=seconds, about=about)
    except OSError as error:  # a full disk: a run goes on
        log.warning("%s/eval could not be written (%s): %s", run_dir, error.strerror, results)


def _classification(encoder: Encoder, item: EvalSet) -> dict[str, float]:
    world, device, C = encoder.world, encoder.world.device, len(item.classnames)
    classes_CD = encoder.classes(item)
    counts_3C = torch.zeros(3, C, dtype=torch.int64, device=device)
    broken = torch.zeros((), dtype=torch.int64, device=device)
    for span, features_nD, usable_n in encoder.images(item):
        targets = torch.tensor(item.labels[span.start : span.stop], device=device, dtype=torch.int64)
        ranks = zero_shot.target_ranks(features_nD @ classes_CD.T, targets).masked_fill(~usable_n, C + 5)
        counts_3C += zero_shot.accuracy_counts(ranks, targets, C)
        broken += (~usable_n).sum()
    counts_3C, total_broken = world.gather_rows(counts_3C[None]).sum(0), int(world.gather_rows(broken[None]).sum())
    _refuse_all_broken(item, total_broken)
    return zero_shot.accuracy_metrics(counts_3C) | {"images": len(item), "broken": total_broken}


def _retrieval(encoder: Encoder, item: EvalSet, run_dir: Path | None, step: int | None) -> dict[str, float]:
    world = encoder.world
    batches = list(encoder.images(item))
    images_ND = join([features for _, features, _ in batches], len(item), encoder.batch, world)
    usable_N = join([usable.byte() for _, _, usable in batches], len(item), encoder.batch, world).bool()
    broken = int((~usable_N).sum())
    _refuse_all_broken(item, broken)
    captions_MD = encoder.texts(item.captions)

    # A broken image and its captions are misses. The other queries are ranked without them.
    owner_M = torch.tensor(item.owner, device=world.device)
    kept_M = usable_N[owner_M]
    new_index_N = usable_N.long().cumsum(0) - 1
    image_ranks, caption_ranks = retrieval.retrieval_ranks(
        images_ND[usable_N], captions_MD[kept_M], new_index_N[owner_M[kept_M]], world=world
    )
    misses = torch.full((max(len(usable_N), len(owner_M)),), retrieval.UNREACHABLE, device=world.device)
    metrics = retrieval.retrieval_metrics(
        torch.cat([image_ranks, misses[:broken]]), torch.cat([caption_ranks, misses[: int((~kept_M).sum())]])
    )
    if run_dir is not None and world.main:
        save_examples(run_dir, step, item, images_ND, captions_MD, usable_N)
    return metrics | {"images": len(item), "captions": len(item.captions), "broken": broken}


def _refuse_all_broken(item: EvalSet, broken: int) -> None:
    if broken == len(item):
        raise UserError(f"eval.sets: none of the {len(item)} images of {item.path} can be decoded; fetch the set again")
