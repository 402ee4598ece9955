"""Launches of the Triton kernels: panels, tiles, strides, copies and failures. Where these run: test_backend.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.loss.machine import Machine
from clipscale.loss.triton import backend as triton_backend
from clipscale.loss.triton.panels import PaddedBlock, Panel
from clipscale.loss.triton.tuning import Tiles, Tuning
from tests.loss.cases import results
from tests.loss.triton.test_backend import DEVICE, everything, problem, weights
from tests.loss.triton.truth import Problem, distance, features


def test_panels_bound_the_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(35, 40, 16, 100.0, keys=5)
    whole = everything(p)
    shapes: list[tuple[int, int]] = []
    panels = PaddedBlock.panels

    def recorded(self: PaddedBlock, height: int, width: int, *options: Any, **more: Any) -> Iterator[Panel]:
        shapes.append((height, width))
        return panels(self, height, width, *options, **more)

    monkeypatch.setattr(PaddedBlock, "panels", recorded)
    for x, y in zip(everything(p, Tuning(partial_bytes=128, panel_bytes=4096)), whole, strict=True):
        assert x is not None and y is not None
        assert distance(x, y.double()) <= 2e-6, distance(x, y.double())
    if DEVICE == "cpu":
        assert shapes == [(32, 32)] * 7, f"panels of whole tiles near 128 bytes of sums and 4096 of gradients: {shapes}"


def test_tiles_may_be_chosen_by_the_caller() -> None:
    p = problem(20, 40, 32, 10.0)
    for x, y in zip(everything(p, Tuning(Tiles(32, 32, 16, 4, 2))), everything(p), strict=True):
        assert x is not None and y is not None
        assert distance(x, y.double()) <= 2e-6, distance(x, y.double())
    with pytest.raises(RuntimeError, match=r"lse_kernel failed on .* with 12x12x12-4w-2s.*power of 2"):
        everything(p, Tuning(Tiles(12, 12, 12, 4, 2)))


def test_any_strides_will_do() -> None:
    p = problem(33, 41, 24, 14.3)
    want = p.computed_softmax(weights(p))
    wide = torch.zeros(33, 100, device=DEVICE)
    wide[:, 3:27] = p.u
    for u in (p.u.T.contiguous().T, wide[:, 3:27]):
        got = Problem(u, p.v, p.scale).computed_softmax(weights(p))
        assert distance(got[0], want[0].double()) <= 1e-6
        assert distance(got[1], want[1].double()) <= 1e-6


def test_not_a_number_stays_visible() -> None:
    p = problem(20, 40, 16, 10.0)
    p.u[7, 3] = torch.nan
    r, c = p.computed_lse(weights(p))
    assert r is not None and c is not None
    assert bool(r[7].isnan()) and bool(c.isnan().all()), (r, c)
    assert bool(r[:7].isfinite().all()), r


def test_a_kernel_that_fails_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        __name__ = "lse_kernel"
        arg_names = ()

        def __getitem__(self, grid: object) -> Any:
            raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(triton_backend, "lse_kernel", Broken())
    p = problem(4, 4, 8, 1.0)
    with pytest.raises(RuntimeError, match=r"lse_kernel failed on .*out of resource: shared memory"):
        p.computed_lse(weights(p))


def test_a_kernel_that_fails_leaves_float16_gradients_in_their_own_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **constants: object) -> None:
        raise RuntimeError("out of memory")

    p = problem(20, 20, 8, 5.0, dtype=torch.float16)
    tiny = torch.full((20,), 1e-6, device=DEVICE)
    lse, before = p.computed_lse((tiny, tiny)), torch.randn(20, 8, device=DEVICE)
    grads = before.clone(), before.clone()
    monkeypatch.setattr(Machine, "launch", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        p.computed_softmax((tiny, tiny), lse, grads=grads)
    assert torch.equal(grads[0], before) and torch.equal(grads[1], before)


@pytest.mark.parametrize("width", [41])
def test_features_are_padded_once_and_gradients_are_not(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass copies what it is given; in a ring it would do so at every hop."""
    copied: list[tuple[int, ...]] = []
    aligned = Machine.aligned

    def recorded(self: Machine, x: Tensor, depth: int) -> Tensor:
        result = aligned(self, x, depth)
        if result.data_ptr() != x.data_ptr():
            copied.append(tuple(x.shape))
        return result

    monkeypatch.setattr(Machine, "aligned", recorded)
    for slab in (2**14, 16):  # gradients summed at once, and in parts
        monkeypatch.setattr("clipscale.loss.side_gradient.SLAB", slab)
        monkeypatch.setattr("clipscale.loss.side_gradient.GRAIN", 8)
        u, v = (x.half() for x in features("pairs", 25, 34, width, torch.float32, DEVICE))
        found, true = (
            results(contrastive_loss, u.to(dtype), v.to(dtype), 10.0, backend=backend)
            for dtype, backend in ((torch.float16, "triton"), (torch.float64, "tiled"))
        )
        assert not copied, f"copies of {copied}"
        for name, got, truth in zip(("value", "images", "texts", "scale"), found, true):
            assert got.is_contiguous() and got.untyped_storage().nbytes() == got.nbytes, name
            assert distance(got, truth) <= 1e-3, f"{name} is off by {distance(got, truth):.1e}"
