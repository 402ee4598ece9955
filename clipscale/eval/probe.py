"""Linear probe and few-shot: a logistic regression on the image features of a set's training split (CLIP, section 3.2 and appendix A.3).

The L2 strength is chosen on pictures held out of the training split, and then all of these train the final one. Ranks share the choice.

N: pictures of training, M: pictures of the test, n: pictures of a chunk, C: classes, D: feature width.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.distributed.world import World
from clipscale.eval import zero_shot
from clipscale.eval.encode import Encoder, join
from clipscale.eval.sets.item import EvalSet

log = logging.getLogger(__name__)

FIRST = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)
"""Powers of ten of the L2 strengths that are tried first; then between the best and its neighbours, to 8 a decade, as in CLIP."""
FINEST = 1 / 8
HELD_OUT = 5
"""One picture of so many of a class is held out for the choice."""
SHOTS_HELD_OUT = 4
"""Most pictures of a class held out in few-shot learning, as in CoOp (Zhou et al. 2022, section 4.1)."""
DRAWS = 3
"""Draws of training pictures over which few-shot figures are averaged."""
MOST_STEPS = 1000
CHUNK = 1 << 24
"""Most scores, and most numbers of the features, that a pass takes at once."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Image features with their labels."""

    features: Tensor
    """(N, D), or more rows, of which `rows` are these."""
    labels: Tensor
    """(N,): their classes."""
    rows: Tensor | None = None
    """(N,): their rows in `features`; None: all of them, in order."""

    def __getitem__(self, index: Tensor) -> "LabelledFeatures":
        """Some of them; the features are not copied. index: int64."""
        rows = index if self.rows is None else self.rows[index]
        return LabelledFeatures(self.features, self.labels[index], rows)

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in: float64 on a CPU."""
        return torch.float64 if self.features.device.type == "cpu" else self.features.dtype

    def chunks(self, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (n, D) and labels (n,) of so many at once that neither the features nor the scores exceed CHUNK numbers."""
        size = max(1, CHUNK // max(classes, self.features.shape[1]))
        for start in range(0, len(self.labels), size):
            span = slice(start, start + size)
            rows = span if self.rows is None else self.rows[span]
            yield self.features[rows].to(self.dtype), self.labels[span]


def metrics(encoder: Encoder, item: EvalSet, train: EvalSet) -> dict[str, float]:
    """The metrics of a probe: those of classification, and `top1_std` of few-shot learning. A collective."""
    key = item.path, len(item), len(train)
    if key not in encoder.probe_features:
        encoder.probe_features.clear()
        encoder.probe_features[key] = _encoded(encoder, train), _encoded(encoder, item)
    of_train, of_test = encoder.probe_features[key]
    usable = of_train.features.sum(1).isfinite()  # without a copy of the features
    if usable.any():
        train_set = of_train if usable.all() else of_train[usable.nonzero()[:, 0]]
        found, strengths = evaluate(train_set, of_test, len(item.classnames), item.shots, encoder.world)
        log.info("%s: L2 strength %s", item.label(), ", ".join(f"{strength:.3g}" for strength in strengths))
    else:  # of a diverged model too: a run goes on
        log.warning("eval.probe: %s: none of the %d images of %s has features", item.label(), len(train), train.path)
        found = {"top1": 0.0, "top5": 0.0, "mean_per_class_recall": 0.0}
    return found | {"images": len(item), "broken": int(of_test.features.isnan().all(1).sum())}


def _encoded(encoder: Encoder, item: EvalSet) -> LabelledFeatures:
    """Unit features of all images on every rank, NaN for broken ones."""
    parts = [features.masked_fill(~usable[:, None], torch.nan) for _, features, usable in encoder.images(item)]
    features_ND = join(parts, len(item), encoder.batch, encoder.world)
    labels_N = torch.tensor(item.labels, device=features_ND.device)
    return LabelledFeatures(features_ND, labels_N)


def fit(train: LabelledFeatures, classes: int, strength: float) -> Tensor:
    """Weights and biases (C, D + 1) that minimise sum_i CE(W x_i + b, y_i) + strength |W|^2 / 2, by L-BFGS.

    It is the problem of scikit-learn's LogisticRegression with C = 1 / strength.
    """
    count = len(train.labels)
    shape = classes, train.features.shape[1] + 1
    weights = torch.zeros(shape, dtype=train.dtype, device=train.features.device, requires_grad=True)
    tolerance = 1e-7 if weights.dtype == torch.float64 else 1e-5
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=MOST_STEPS,
        tolerance_grad=tolerance,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=weights.dtype, device=weights.device)
        for number, (x_nD, y_n) in enumerate(train.chunks(classes)):
            loss = F.cross_entropy(scores(weights, x_nD), y_n, reduction="sum")
            if number == 0:
                loss = loss + strength / 2 * weights[:, :-1].square().sum()
            # a mean, so that the tolerance does not depend on the number of pictures
            (loss / count).backward()
            total += loss.detach() / count
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    return weights.detach()


def scores(weights: Tensor, x_nD: Tensor) -> Tensor:
    """(n, C)."""
    return F.linear(x_nD, weights[:, :-1], weights[:, -1])


def ranks_of(weights: Tensor, test: LabelledFeatures) -> Tensor:
    """The ranks (M,) of the right classes, from 0."""
    return torch.cat([zero_shot.target_ranks(scores(weights, x), y) for x, y in test.chunks(len(weights))])


def accuracy(weights: Tensor, test: LabelledFeatures) -> float:
    """Top-1 as a share."""
    return float((ranks_of(weights, test) < 1).double().mean())


def choose(train: LabelledFeatures, rest: LabelledFeatures, classes: int, world: World) -> float:
    """The L2 strength of the highest accuracy on `rest`, by CLIP's search. Of equal ones the largest; 1 where nothing is held out.

    Rank r takes every world-size-th strength. A collective.
    """
    if not len(rest.labels):
        return 1.0
    found: dict[float, float] = {}

    def measure(powers: Sequence[float]) -> None:
        own = {p: accuracy(fit(train, classes, 10.0**p), rest) for p in powers[world.rank :: world.size]}
        for part in world.gather(own):
            found.update(part)

    measure(FIRST)
    step = FIRST[1] - FIRST[0]
    while step > FINEST:
        step /= 2
        best = max(found, key=lambda p: (found[p], p))
        measure([p for p in (best - step, best + step) if FIRST[0] <= p <= FIRST[-1]])
    return float(10.0 ** max(found, key=lambda p: (found[p], p)))


def held_out(labels_N: Tensor, classes: int, shots: int | None, draw: int) -> tuple[Tensor, Tensor]:
    """Indices of pictures to train on and of pictures held out, in random order drawn by `draw`.

    shots: so many of each class train, and at most SHOTS_HELD_OUT others are held out; None: one of HELD_OUT is held out. A class of
    one picture trains.
    """
    generator = torch.Generator().manual_seed(draw)
    order = torch.randperm(len(labels_N), generator=generator)
    order = order[labels_N[order].argsort(stable=True)]  # by class, random within
    sorted_labels = labels_N[order]
    counts = torch.bincount(sorted_labels, minlength=classes)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[sorted_labels]
    if shots is None:
        trains = place >= torch.where(counts > 1, (counts // HELD_OUT).clamp(min=1), 0)[sorted_labels]
        return order[trains], order[~trains]
    trains = place < shots
    return order[trains], order[(place >= shots) & (place < shots + min(shots, SHOTS_HELD_OUT))]


def evaluate(
    train: LabelledFeatures, test: LabelledFeatures, classes: int, shots: int | None, world: World
) -> tuple[dict[str, float], list[float]]:
    """Metrics of the test, and the chosen strengths; of few-shot learning the means over DRAWS draws, and `top1_std`. A collective.

    A picture of the test whose features are NaN is a miss.
    """
    found, strengths = [], []
    for draw in range(DRAWS if shots else 1):
        trains, rest = (part.to(train.labels.device) for part in held_out(train.labels.cpu(), classes, shots, draw))
        strengths.append(choose(train[trains], train[rest], classes, world))
        weights = fit(train[trains] if shots else train, classes, strengths[-1])
        ranks = ranks_of(weights, test)
        counts = zero_shot.accuracy_counts(ranks, test.labels, classes)
        found.append(world.broadcast(zero_shot.accuracy_metrics(counts)))
    metrics = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    if shots:
        metrics["top1_std"] = float(torch.tensor([one["top1"] for one in found], dtype=torch.float64).std(correction=0))
    return metrics, strengths
