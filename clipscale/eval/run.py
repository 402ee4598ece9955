"""Evaluates a model on zero-shot classification and retrieval sets, during training and by the `eval` verb.

A set measures the model itself: `eval/classification.py`, `eval/retrieval.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import open_clip
import torch

from clipscale import __version__
from clipscale.common import files
from clipscale.common.cpu import cores_of_rank
from clipscale.common.record import Metrics, Results
from clipscale.common.signals import Poll, no_poll
from clipscale.common.terminal import log_warning
from clipscale.distributed.world import World
from clipscale.eval.encode import EvalEncoder
from clipscale.eval.sets.item import EvalSet
from clipscale.models.towers import ClipModel
from clipscale.run_folder.paths import EVAL
from clipscale.run_folder.records import EvalRecord, read_evaluation
from clipscale.run_folder.set_aside import read_or_set_aside


@dataclass(frozen=True)
class ResultsFile:
    """The file of a run's results at a step: RUN/eval/step_N.json, or RUN/eval/final.json without a step."""

    run_dir: Path
    step: int | None = None
    # Facts about the results that the caller knows, such as the precision.
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.run_dir / EVAL / ("final.json" if self.step is None else f"step_{self.step:08d}.json")

    def record(self) -> EvalRecord:
        """The content of the file; without a file, no results."""
        empty: EvalRecord = {"step": self.step, "results": {}, "measured": {}}
        return {**empty, **(read_or_set_aside(self.path, read_evaluation) or empty)}

    def add(self, label: str, metrics: Metrics, measured: Mapping[str, object]) -> None:
        """Write a set's metrics and what they belong to. Results of other sets stay. Raises OSError."""
        record = self.record()
        record["results"][label] = metrics
        record["measured"][label] = {**measured, **self.facts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(self.path, record)


@dataclass(frozen=True)
class Evaluation:
    """The settings of an evaluation: its sets, and the way in which a model is measured."""

    sets: Sequence[EvalSet]
    # Images or captions encoded at once.
    batch_size: int = 256
    # The training's objective; empty: not known, and held-out pairs have no loss.
    objective: str = ""
    # Matryoshka sizes: the first dimensions of the features have results of their own, named `SET (size 64)`.
    sizes: Sequence[int] = ()
    # Whether the weights' moving average (EMA) is evaluated, not the weights themselves.
    uses_ema: bool = False
    # Facts that the results' file has for all results.
    facts: Mapping[str, object] = field(default_factory=dict)


def evaluate(
    model: ClipModel,
    evaluation: Evaluation,
    world: World,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    file: ResultsFile | None = None,
    poll: Poll = no_poll,
    poll_while_waiting: Poll = no_poll,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Results:
    """Measure the model on every set. A collective. Returns the same metrics on every rank.

    Puts the model into evaluation mode meanwhile.

    - Metrics cover the usable images of a set: those that can be decoded, and have a caption where the set has any.
    - `broken` counts the other images; the file has their reasons.
    - Names: `SET (ema)` with averaged weights, which the caller puts into the model; `SET (limit N)` of a part.

    Args:
        file: rank 0 writes into it after each set.
        poll: called before each batch, equally often on every rank. What it raises ends the evaluation.
        poll_while_waiting: called a few times a second on a rank that waits for pictures. What it raises also ends the
            evaluation.
        progress: `progress(task, done, total)` is called after each batch.

    Raises UserError for sets that cannot be used. Where `file` cannot be written, a line says so.
    """
    encoder = EvalEncoder(
        model,
        world,
        autocast,
        evaluation.batch_size,
        threads=min(8, cores_of_rank()),
        poll=poll,
        poll_while_waiting=poll_while_waiting,
        progress=progress,
        objective=evaluation.objective,
        sizes=evaluation.sizes,
    )
    results = {}
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.train(False)
        for eval_set in evaluation.sets:
            started = time.perf_counter()
            measurement = eval_set.measure(encoder)
            for sized_set, metrics in zip(sized_sets(eval_set, evaluation.sizes), measurement.metrics, strict=True):
                metrics["broken"] = measurement.broken.total()
                if sized_set.main_metrics:
                    main = [metrics[name] for name in sized_set.main_metrics]
                    metrics["main"] = sum(main) / len(main)
                results[sized_set.label] = metrics
                if file is None or not world.is_rank0:
                    continue
                facts = measurement_facts(sized_set) | {
                    "batch": evaluation.batch_size,
                    "broken": dict(measurement.broken),
                }
                if measurement.written and sized_set is eval_set:
                    facts["written"] = measurement.written
                try:
                    file.add(sized_set.label, metrics, facts | {"seconds": round(time.perf_counter() - started, 3)})
                except OSError as error:  # the other ranks go on
                    log_warning(f"{file.path} cannot be written ({error.strerror})", error=True)
    return results


def sized_sets(eval_set: EvalSet, sizes: Sequence[int]) -> list[EvalSet]:
    """The set itself, then a copy for each of the `sizes` of features, whose results have a name of their own."""
    return [eval_set, *(replace(eval_set, marks=(*eval_set.marks, f"size {size}")) for size in sizes)]


def measurement_facts(eval_set: EvalSet) -> dict[str, object]:
    """The facts on which the results of a set depend: its images, its prompts, and versions."""
    facts: dict[str, object] = {"path": str(eval_set.path), "kind": eval_set.kind, "images": len(eval_set)}
    facts |= eval_set.facts()
    if eval_set.main_metrics:
        facts["main"] = list(eval_set.main_metrics)
    versions = {"clipscale": __version__, "torch": str(torch.__version__), "open_clip": open_clip.__version__}
    return facts | {"versions": versions, "time": datetime.now(UTC).isoformat(timespec="seconds")}
