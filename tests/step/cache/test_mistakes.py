"""What the gradient cache refuses, with a message that names it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipscale.step.cache.encoder_io import ChunkOutput
from clipscale.step.cache.grad_cache import GradCache
from tests.step.cache.encoders import batch, models
from tests.support.gradients import gradients

MISTAKES = {
    "one size of at least 1": {"chunks": 0},
    "one for each of 2 encoders": {"chunks": [4]},
    "chunks=1.5: one size of at least 1": {"chunks": 1.5},
    "1 inputs for 2 encoders": {"inputs": [torch.ones(4, 3)]},
    "the loss is 3.0: give one number": {"loss": lambda u, v: 3.0},
    r"the loss is of shape \(8, 8\): give one number": {"loss": lambda u, v: u @ v.T},
    "the loss is detached": {"loss": lambda u, v: (u @ v.T).sum().detach()},
    "does not use the representations of encoder 1": {"loss": lambda u, v: u.sum()},
    "returned 1 rows for 4 samples": {"image": lambda x: x[:1] * 2.0},
    "returned a tuple, not a tensor; representation=": {"image": lambda x: (x,)},
    "representation= returned a int": {"options": {"representation": lambda out: 1}},
    "has 1 functions for 2 encoders": {"options": {"representation": [None]}},
    "has trainable parameters": {"options": {"representation": nn.Linear(5, 5)}},
    "keep_bytes='1G': give a number of bytes": {"options": {"keep_bytes": "1G"}},
    "keep_bytes=-1: give a number of bytes": {"options": {"keep_bytes": -1}},
    "keep_bytes=nan: give a number of bytes": {"options": {"keep_bytes": math.nan}},
    "scaler=1024.0: give a gradient scaler": {"options": {"scaler": 1024.0}},
    "autocast=True: give a function that": {"options": {"autocast": True}},
    "autocast=.*: give a function that": {"options": {"autocast": torch.autocast("cpu")}},
    "holds no tensor": {"inputs": [{"input_ids": [[1, 2], [3]]}] * 2},
    "empty batch": {"n": 0},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message: str) -> None:
    given = {**models(), "loss": lambda u, v: (u @ v.T).sum(), "chunks": 4, "n": 8, "options": {}} | MISTAKES[message]
    with pytest.raises(ValueError, match=message):
        cache = GradCache([given["image"], given["text"]], given["loss"], chunks=given["chunks"], **given["options"])
        cache.step(*given.get("inputs", (x[: given["n"]] for x in batch(8))))


class Hidden(nn.Module):
    """A module that uses another one and does not list it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.modules_of_others = [module]

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_of_others[0](x)


@pytest.mark.parametrize("requires_grad", ["parameter", "input", "neither"])
def test_a_gradient_that_would_be_lost_is_refused(requires_grad: str) -> None:
    """A module without trainable parameters has no second pass."""
    model = models()
    x, y = batch(8)
    model["image"].requires_grad_(requires_grad == "parameter")
    x.requires_grad_(requires_grad == "input")

    def cache_of(encoder: Callable[[Tensor], Tensor]) -> GradCache:
        return GradCache([encoder, model["text"]], lambda u, v: (u @ v.T).sum(), chunks=4)

    if requires_grad == "neither":
        cache_of(Hidden(model["image"])).step(x, y)
        return
    with pytest.raises(ValueError, match="a function that calls it"):
        cache_of(Hidden(model["image"])).step(x, y)
    hidden = Hidden(model["image"])
    cache_of(lambda x: hidden(x)).step(x, y)
    gradient = x.grad if requires_grad == "input" else next(model["image"].parameters()).grad
    assert gradient is not None and gradient.any()


@pytest.mark.parametrize("keep", [0, math.inf])
@pytest.mark.parametrize("has_loss", [False, True])
def test_a_detached_encoder_that_trains_is_refused(has_loss: bool, keep: float) -> None:
    model = models()

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model["image"]

        def forward(self, x: Tensor) -> Tensor | ChunkOutput:
            y = self.module(x).detach()
            return ChunkOutput(y, y.sum()) if has_loss else y

    cache = GradCache([Detached(), model["text"]], lambda u, v: (u @ v.T).sum(), chunks=4, keep_bytes=keep)
    with pytest.raises(ValueError, match=r"without a graph to its parameters, .* leave out its \.detach\(\)"):
        cache.step(*batch(8))


def test_a_budget_that_is_set_later_is_checked_as_well() -> None:
    cache = GradCache([nn.Linear(2, 2)], torch.sum, chunks=1)
    with pytest.raises(ValueError, match="keep_bytes='8G': give a number of bytes"):
        cache.keep_bytes = "8G"


@pytest.mark.parametrize("chunks", [[4, 4], [0], 2.5])
def test_chunks_that_are_set_later_are_checked_as_well(chunks: Any) -> None:
    cache = GradCache([nn.Linear(2, 2)], torch.sum, chunks=1)
    for first_pass in (cache.step, partial(cache.encode_tower, 0)):
        cache.chunks = chunks
        with pytest.raises(ValueError, match="one size of at least 1, or one for each of 1 encoders"):
            first_pass(torch.ones(4, 2))


def test_a_replay_without_a_backward_pass_is_refused() -> None:
    """It would leave all gradients as they were."""
    model = models()
    cache = GradCache([model["image"], model["text"]], lambda u, v: (u @ v.T).sum(), chunks=4)
    with pytest.raises(ValueError, match="encode and backward come before"):
        cache.replay()
    cache.encode(*batch(8))
    with pytest.raises(ValueError, match="encode and backward come before"):
        cache.replay()
    cache.backward(cache.loss(*cache.encode(*batch(8))))
    cache.replay()
    with pytest.raises(ValueError, match="encode and backward come before"):
        cache.replay()


def test_a_keyword_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_size'"):
        GradCache([nn.Linear(2, 2)], torch.sum, chunks=1, chunk_size=1)  # type: ignore[call-arg]


def test_a_loss_that_is_scaled_already_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = models(dtype=torch.float32)
    inputs = batch(12, torch.float32)

    def cache_of(factor: Callable[[Tensor], Tensor], scaler: torch.amp.GradScaler = scaler) -> GradCache:
        def loss(u: Tensor, v: Tensor) -> Tensor:
            return factor(model["head"](u, v))

        return GradCache([model["image"], model["text"]], loss, chunks=4, scaler=scaler)

    with pytest.raises(ValueError, match=r"the loss ends in scaler\.scale\(\.\.\.\)"):
        cache_of(scaler.scale).step(*inputs)
    assert not any(gradient.any() for gradient in gradients(model).values())
    cache_of(lambda value: 1024.0 * value).step(*inputs)
    cache_of(lambda value: value * torch.tensor(1024.0)).step(*inputs)
    unused = torch.amp.GradScaler("cpu", enabled=False)
    value = cache_of(unused.scale, unused).step(*inputs)
    with pytest.raises(RuntimeError, match="does not require grad"):
        scaler.scale(value).backward()
