"""Evaluates a model on zero-shot classification and retrieval sets, during training and by the `eval` verb.

A set measures the model itself: `eval/classification.py`, `eval/retrieval.py`.
"""

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
from clipscale.eval.encode import Encoder
from clipscale.eval.sets.item import EvalSet
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
    views = world.gather([(eval_set.label, len(eval_set)) for eval_set in sets])
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
    threads = min(8, cores_of_rank())
    encoder = Encoder(model, world, autocast, config.batch, threads, before_batch, progress)
    folder = run_dir if world.main else None
    results: Results = {}
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.train(False)
        for eval_set in sets:
            started = time.perf_counter()
            metrics = eval_set.measure(encoder, folder, step)
            if metrics["broken"] == len(eval_set):
                raise UserError(
                    f"eval.sets: none of the {len(eval_set)} images of {eval_set.path} can be read; fetch it again"
                )
            if eval_set.metric:
                metrics["main"] = sum(metrics[name] for name in eval_set.metric) / len(eval_set.metric)
            results[eval_set.label] = metrics
            if folder is not None:
                seconds = round(time.perf_counter() - started, 3)
                facts = measured(eval_set, {"batch": config.batch, "seconds": seconds} | (about or {}))
                save_results(folder, step, {eval_set.label: metrics}, {eval_set.label: facts})
    return results


def measured(eval_set: EvalSet, about: dict[str, Any]) -> dict[str, Any]:
    """What the results of a set belong to: how much of the set, its prompts, versions, and what the caller knows."""
    facts: dict[str, Any] = {"path": str(eval_set.path), "kind": eval_set.kind, "images": len(eval_set)}
    if eval_set.whole is not None:
        facts |= {"of": eval_set.whole, "chosen": "of each class in proportion"}
    facts |= eval_set.facts()
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
