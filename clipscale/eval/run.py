"""Evaluates a model on zero-shot classification and retrieval sets, during training and by the `eval` verb.

Every rank takes an equal, contiguous share of the images and texts (the last share is padded), so all ranks make the same number of
forward passes. FSDP2's towers, which communicate in their forward pass, can thus be evaluated as they are.

N: images, M: captions, n: one rank's share, C: classes, D: feature width.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.config.checks import check_values
from clipscale.config.redact import redacted
from clipscale.config.sections import EvalConfig
from clipscale.data.decode import BrokenSampleError, EvalTransform
from clipscale.distributed import World
from clipscale.errors import UserError
from clipscale.eval import retrieval, zero_shot
from clipscale.eval.examples import save_examples
from clipscale.eval.sets.item import RETRIEVAL, EvalSet
from clipscale.eval.sets.load import load_sets
from clipscale.hardware import cores_of_rank
from clipscale.models.towers import ClipModel

log = logging.getLogger(__name__)

Results = dict[str, dict[str, float]]
"""Set name -> metric name -> value; the metrics are shares in [0, 1], except the counts `images`, `captions` and `broken`."""


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
) -> Results:
    """Metrics of every set, the same on every rank. A collective: every rank calls it.

    Broken images count as misses, so every metric covers all images of its set; the metric `broken` counts them. With `run_dir`, rank 0
    writes `eval/step_N.json` and the retrieved examples there. The model is in evaluation mode meanwhile, and put back afterwards. Sets
    evaluated with averaged weights, which the caller puts into the model, are named `SET (ema)`. `before_batch()` is called equally often
    on every rank; what it raises ends the evaluation.

    Raises UserError for sets that cannot be used.
    """
    started = time.perf_counter()
    sets = check(config, world)
    threads = config.workers or min(8, cores_of_rank())
    encoder = _Encoder(model, world, autocast, config.batch, threads, before_batch)
    results: Results = {}
    training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for item in sets:
                if item.kind == RETRIEVAL:
                    results[item.name] = _retrieval(encoder, item, run_dir, step)
                else:
                    results[item.name] = _classification(encoder, item)
    finally:
        model.train(training)
    if config.weights == "ema":
        results = {f"{name} (ema)": metrics for name, metrics in results.items()}
    if run_dir is not None and world.main and sets:
        try:
            save_results(run_dir, step, results, seconds=time.perf_counter() - started)
        except OSError as error:  # a full disk: a run goes on
            log.warning("%s/eval could not be written (%s): %s", run_dir, error.strerror, results)
    return results


def save_results(run_dir: Path, step: int | None, results: Results, *, seconds: float) -> Path:
    """Write `eval/step_N.json`, or `eval/final.json`. Results of other sets from an earlier call stay in the file."""
    path = run_dir / "eval" / ("final.json" if step is None else f"step_{step:08d}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(path.read_text())["results"] if path.is_file() else {}
    record = {"step": step, "seconds": round(seconds, 3), "results": earlier | results}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(redacted(record), indent=1) + "\n")
    temporary.replace(path)
    return path


def _classification(encoder: "_Encoder", item: EvalSet) -> dict[str, float]:
    world, device, C = encoder.world, encoder.world.device, len(item.classnames)
    names = [item.classnames[i or 0] for i in _share(C, world)]
    classes_CD = world.gather_rows(
        zero_shot.class_embeddings(encoder.text, encoder.model.tokenizer, names, item.templates, batch=encoder.batch)
    )[:C]
    counts_3C = torch.zeros(3, C, dtype=torch.int64, device=device)
    broken = torch.zeros((), dtype=torch.int64, device=device)
    for indices, features_nD, usable_n in encoder.images(item):
        real = torch.tensor([i is not None for i in indices], device=device)
        targets = torch.tensor([item.labels[i] if i is not None else 0 for i in indices], device=device)
        ranks = zero_shot.target_ranks(features_nD @ classes_CD.T, targets).masked_fill(~usable_n, C + 5)
        counts_3C += zero_shot.accuracy_counts(ranks[real], targets[real], C)
        broken += (real & ~usable_n).sum()
    counts_3C, total_broken = world.gather_rows(counts_3C[None]).sum(0), int(world.gather_rows(broken[None]).sum())
    _refuse_all_broken(item, total_broken)
    return zero_shot.accuracy_metrics(counts_3C) | {"images": len(item), "broken": total_broken}


def _retrieval(encoder: "_Encoder", item: EvalSet, run_dir: Path | None, step: int | None) -> dict[str, float]:
    world = encoder.world
    batches = list(encoder.images(item))
    images_ND = world.gather_rows(torch.cat([features for _, features, _ in batches]))[: len(item)]
    usable_N = world.gather_rows(torch.cat([usable for _, _, usable in batches]).byte())[: len(item)].bool()
    broken = int((~usable_N).sum())
    _refuse_all_broken(item, broken)
    captions_MD = encoder.texts(item.captions)

    # A broken image and its captions are misses. The other queries are ranked without them.
    owner_M = torch.tensor(item.owner, device=world.device)
    kept_M = usable_N[owner_M]
    new_index_N = usable_N.long().cumsum(0) - 1
    image_ranks, caption_ranks = retrieval.retrieval_ranks(
        images_ND[usable_N], captions_MD[kept_M], new_index_N[owner_M[kept_M]]
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


@dataclass
class _Encoder:
    """Encodes this rank's share of images and texts."""

    model: ClipModel
    world: World
    autocast: Callable[[], AbstractContextManager[Any]]
    batch: int
    threads: int
    before_batch: Callable[[], None]

    def text(self, tokens_nT: Tensor) -> Tensor:
        self.before_batch()
        with self.autocast():
            return self.model.text(tokens_nT.to(self.world.device))

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features (M, D) of all texts, on every rank."""
        mine = [texts[i or 0] for i in _share(len(texts), self.world)]
        parts = [
            F.normalize(self.text(self.model.tokenizer(mine[a : a + self.batch])).float(), dim=-1)
            for a in range(0, len(mine), self.batch)
        ]
        return self.world.gather_rows(torch.cat(parts))[: len(texts)]

    def images(self, item: EvalSet) -> Iterator[tuple[list[int | None], Tensor, Tensor]]:
        """For each batch: indices (None: padding), unit features (n, D), and whether each image could be decoded.

        Threads decode the next batch while the device encodes this one.
        """
        transform = EvalTransform(self.model.image_size, border=item.border)
        broken: Counter[str] = Counter()

        def pixels_of(index: int | None) -> Tensor | None:
            if index is None:
                return None
            try:
                return torch.from_numpy(transform(item.images[index].read()))
            except BrokenSampleError as error:
                broken[error.reason] += 1
            except OSError:
                broken["unreadable_file"] += 1
            return None

        device, share = self.world.device, _share(len(item), self.world)
        spans = [share[a : a + self.batch] for a in range(0, len(share), self.batch)]
        with ThreadPoolExecutor(self.threads) as pool:
            waiting = [pool.submit(pixels_of, i) for i in spans[0]]
            for indices, following in zip(spans, [*spans[1:], []]):
                self.before_batch()
                decoded = [future.result() for future in waiting]
                waiting = [pool.submit(pixels_of, i) for i in following]
                usable = torch.tensor([pixels is not None for pixels in decoded], device=device)
                blank = torch.zeros(3, self.model.image_size, self.model.image_size, dtype=torch.uint8)
                pixels = torch.stack([blank if p is None else p for p in decoded]).to(device)
                with self.autocast():
                    features = self.model.image(pixels)
                yield indices, F.normalize(features.float(), dim=-1), usable
        if broken:
            reasons = ", ".join(f"{count} {reason}" for reason, count in broken.most_common())
            log.warning("eval.sets: %s: broken images, counted as misses: %s", item.path, reasons)


def _share(count: int, world: World) -> list[int | None]:
    """This rank's contiguous share of 0..count-1, padded with None to the same length on every rank."""
    each = -(-count // world.size)
    return [i if i < count else None for i in range(world.rank * each, (world.rank + 1) * each)]
