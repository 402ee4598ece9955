"""Properties of the loss of any batch, without an oracle."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.config.sections import OBJECTIVES
from tests.loss.cases import error, features, results

ordinary = settings(max_examples=40, derandomize=True)


@dataclass
class Batch:
    """A drawn batch of n pairs and `extra` hard negatives, in float64."""

    n: int
    extra: int
    width: int
    tile: int
    scale: float
    objective: str
    seed: int

    def features(self) -> tuple[Tensor, Tensor]:
        return features(self.n, self.n + self.extra, self.width, seed=self.seed)

    def results(self, u: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
        return results(contrastive_loss, u, v, self.scale, **{"objective": self.objective, "tile": self.tile} | options)

    def assert_equal(self, found: list[Tensor], expected: list[Tensor]) -> None:
        for name, a, b in zip(("value", "images", "texts", "scale", "bias"), found, expected, strict=True):
            off = error(a, b, self.scale / self.n)
            assert off < 1e-12, f"{name} differs by {off:.1e}"


batches = st.builds(
    Batch,
    n=st.integers(1, 9),
    extra=st.integers(0, 4),
    width=st.integers(1, 12),
    tile=st.integers(1, 8),
    scale=st.sampled_from([0.3, 14.3, 100.0]),
    objective=st.sampled_from(OBJECTIVES),
    seed=st.integers(0, 9999),
)


@ordinary
@given(batches)
def test_permuting_pairs_permutes_gradients(batch: Batch) -> None:
    u, v = batch.features()
    generator = torch.Generator().manual_seed(batch.seed)
    pairs, negatives = (torch.randperm(count, generator=generator) for count in (batch.n, batch.extra))
    order = torch.cat([pairs, batch.n + negatives])
    before, after = batch.results(u, v), batch.results(u[pairs], v[order])
    batch.assert_equal(after, [before[0], before[1][pairs], before[2][order], *before[3:]])


@ordinary
@given(batches)
def test_swapping_the_sides_swaps_their_gradients(batch: Batch) -> None:
    u, v = batch.features()
    v = v[: batch.n]
    swapped = {"softmax_image": "softmax_text", "softmax_text": "softmax_image"}.get(batch.objective, batch.objective)
    one, two = batch.results(u, v), batch.results(v, u, objective=swapped)
    batch.assert_equal(one, [two[0], two[2], two[1], *two[3:]])


@ordinary
@given(batches)
def test_adding_a_far_column_changes_nothing(batch: Batch) -> None:
    """A hard negative some hundred nats below every other score adds to no sum and has no gradient."""
    u, v = batch.features()
    u, v = (torch.cat([x, torch.full((len(x), 1), value).double()], 1) for x, value in ((u, 1.0), (v, 0.0)))
    far = torch.zeros(1, batch.width + 1).double()
    far[0, -1] = -400.0 / batch.scale  # <u_i, far> * scale = -400 for every image
    before, after = batch.results(u, v), batch.results(u, torch.cat([v, far]))
    assert float(after[2][-1].abs().max()) < 1e-100, f"the far column has gradient {float(after[2][-1].abs().max())}"
    after[2] = after[2][:-1]
    batch.assert_equal(after, before)


@ordinary
@given(batches)
def test_a_pair_left_out_by_its_keys_is_as_good_as_absent(batch: Batch) -> None:
    """Hard negatives that have the key of every image are left out of all sums, and no gradient passes through them."""
    u, v = batch.features()
    ids = torch.arange(batch.n)
    keys = (ids * 0, torch.cat([1 + ids, torch.zeros(batch.extra).long()]))
    found, absent = batch.results(u, v, keys=keys), batch.results(u, v[: batch.n])
    assert float(found[2][batch.n :].abs().sum()) == 0, "a text that is left out has a gradient"
    found[2] = found[2][: batch.n]
    batch.assert_equal(found, absent)
