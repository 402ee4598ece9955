"""`keep`: exponentials that the forward pass leaves for the backward pass. Exact as without, in three units, within their bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clipscale import contrastive_loss
from clipscale.config.sections import LossConfig
from clipscale.loss.api import configured_loss
from clipscale.loss.kept import Kept, kept_bytes
from clipscale.loss.machine import Machine
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.plan.memory_tracker import without_memory
from tests.loss.cases import assert_exact, errors, features, keys, oracle, results
from tests.loss.workers import Workers, check, stacked

ALL, SOME = "1G", str(2 * 16 * 70 * 8)
"""Every exponential of 63 x 70 scores; two or four of four rows of tiles."""
SOFTMAXES = ["softmax", "softmax_image", "softmax_text"]


@pytest.mark.parametrize("kind", ["random", "aligned", "equal", "orthogonal", "low", "duplicates"])
@pytest.mark.parametrize("keep", [ALL, SOME])
def test_gradients_from_kept_exponentials_are_exact(keep: str, kind: str) -> None:
    for objective in SOFTMAXES:
        for scale in (1.0, 14.3, 100.0):
            u, v = features(63, 70, 33, kind)
            true = oracle(u, v, scale, objective=objective)
            for dtype, bar in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
                found = results(
                    contrastive_loss, u.to(dtype), v.to(dtype), scale, objective=objective, tile=16, keep=keep
                )
                assert_exact(found, true, scale, bar, (keep, kind, objective, scale, dtype))


def test_a_far_row_among_kept_ones_is_exact() -> None:
    """Its exponentials vanish relative to the others': its tiles are computed again."""
    u, v = features(40, 40, 16)
    u[5] *= 1e-3
    v = v + 0.3 * u
    for scale in (100.0, 400.0):
        true = oracle(u, v, scale)
        for dtype, bar in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            found = results(contrastive_loss, u.to(dtype), v.to(dtype), scale, tile=16, keep=ALL)
            assert_exact(found, true, scale, bar, (scale, dtype))


@pytest.mark.parametrize("extra", ["keys", "smoothing"])
def test_keys_and_smoothing_are_exact_with_kept_exponentials(extra: str) -> None:
    u, v = features(63, 70, 33)
    options: dict[str, Any] = keys(63, 70) if extra == "keys" else {"label_smoothing": 0.1}
    true = oracle(u, v, 14.3, **options)
    assert_exact(results(contrastive_loss, u, v, 14.3, tile=16, keep=ALL, **options), true, 14.3, 1e-10, extra)


def test_in_float32_the_bits_are_those_of_recomputed_scores() -> None:
    u, v = (x.float() for x in features(63, 70, 33))
    kept, computed = (results(contrastive_loss, u, v, 100.0, tile=16, keep=keep) for keep in (ALL, "none"))
    assert all(torch.equal(a, b) for a, b in zip(kept, computed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "aligned", "low", "duplicates"])
def test_in_half_precision_the_error_is_at_most_twice_that_of_plain_bfloat16(kind: str, dtype: torch.dtype) -> None:
    for scale in (14.3, 100.0):
        u, v = (x.to(dtype) for x in features(200, 220, 96, kind))
        true = oracle(u, v, scale)
        plain = errors(results(dense_contrastive_loss, u.bfloat16(), v.bfloat16(), scale), true, scale)
        found = errors(results(contrastive_loss, u, v, scale, tile=64, keep=ALL), true, scale)
        for name, of_it in found.items():
            assert of_it <= 2 * plain[name] + 1e-6, f"{name} at scale {scale}: {of_it:.1e}, plain {plain[name]:.1e}"


@pytest.mark.parametrize(
    ("keep", "units"), [("none", 4.0), (str(64 * 16 * 4), 3.75), (str(64 * 48 * 4), 3.25), (ALL, 3.0)]
)
def test_a_step_takes_three_units_where_everything_is_kept(keep: str, units: float) -> None:
    u, v = (x.float().requires_grad_() for x in features(64, 64, 32))
    with FlopCounterMode(display=False) as counter:
        contrastive_loss(u, v, 10.0, tile=16, keep=keep).backward()
    assert counter.get_total_flops() == units * 2 * 64 * 64 * 32


def test_a_second_backward_pass_computes_the_scores_again() -> None:
    u, v = (x.requires_grad_() for x in features(40, 40, 8))
    value = contrastive_loss(u, v, 10.0, tile=16, keep=ALL)
    first = torch.autograd.grad(value, u, retain_graph=True)[0]
    second = torch.autograd.grad(value, u)[0]
    assert torch.allclose(first, second, rtol=1e-12)


@pytest.mark.parametrize("spare", [2**30, 0])
def test_kept_exponentials_serve_gradients_that_are_summed_in_parts(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, v = (x.bfloat16() for x in features(90, 95, 32))
    true = oracle(u, v, 20.0)
    for name, value in (("SLAB", 28), ("GRAIN", 8), ("SPARE_BYTES", spare)):
        monkeypatch.setattr(f"clipscale.loss.side_gradient.{name}", value)
    found = errors(results(contrastive_loss, u, v, 20.0, tile=16, keep=ALL), true, 20.0)
    assert max(found.values()) < 2**-7, found


@pytest.mark.parametrize("exchange", ["replicated", "local", "gather", "ring"])
@pytest.mark.parametrize("keep", [ALL, "2000"])
def test_kept_exponentials_are_exact_on_ranks(ranks: Workers, keep: str, exchange: str) -> None:
    for world in (2, 3, 4):
        u, v = stacked(world, 10, 12, 16)
        check(ranks, world, u, v, 14.3, {"exchange": exchange, "keep": keep, "tile": 4})
        check(ranks, world, u.float(), v.float(), 14.3, {"exchange": exchange, "keep": keep, "tile": 4}, bar=1e-5)


@pytest.mark.parametrize("trained", [True, False])
def test_kept_bytes_stay_within_the_budget_and_are_freed(trained: bool) -> None:
    """By the memory tracker; nothing is kept where no gradient is wanted."""
    n, budget = 4096, 20 << 20  # two rows of tiles take 16 MiB
    peaks = {}
    for keep in ("none", str(budget)):
        with without_memory() as memory:
            u, v = (torch.empty(n, 16, dtype=torch.bfloat16).requires_grad_(trained) for _ in range(2))
            memory.take_peak()
            before = memory.live
            value = configured_loss(u, v, 10.0, None, LossConfig(keep=keep), check=False, machine=OneTile())
            peaks[keep] = memory.take_peak() - before
            if trained:
                value.backward()
                peaks[keep] = max(peaks[keep], memory.take_peak() - before)
            del value
            assert memory.live - before <= 2 * n * 16 * 2 * trained + 4096, "beyond the gradients nothing is left"
    more = peaks[str(budget)] - peaks["none"]
    assert 0.75 * budget * trained <= more <= (budget + 2**16) * trained, f"{more} bytes more"


class OneTile(Machine):
    def parts(self, parts: Any) -> Any:
        return iter([next(parts)])


def test_budgets() -> None:
    cpu = torch.device("cpu")
    assert [kept_bytes(setting, Machine(), cpu) for setting in ("none", "auto", "8G")] == [0.0, 0.0, 8 * 2**30]

    class Gpu(Machine):
        def free_bytes(self, device: torch.device) -> int:
            return 100

    assert kept_bytes("auto", Gpu(), cpu) == 50.0
    with pytest.raises(ValueError, match="keep=much: give none, auto, or bytes such as 8G"):
        contrastive_loss(*features(3, 3, 4), 1.0, keep="much")


def test_whole_rows_of_tiles_are_kept_while_they_fit() -> None:
    def kept(budget: float) -> dict[int, Tensor]:
        found = Kept(budget)
        u, v = features(64, 64, 8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("clipscale.loss.api.Kept", lambda _: found)
            contrastive_loss(u.requires_grad_(), v, 10.0, tile=16)
        return {number: kept.values for number, kept in found.visits.items()}

    assert kept(16 * 64 * 8 - 1) == {}
    assert {number: x.shape for number, x in kept(33 * 64 * 8).items()} == {0: (32, 64)}
