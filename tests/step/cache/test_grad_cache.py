"""The gradient cache gives the loss, the gradient and the random numbers of one graph over the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipscale.step.cache.grad_cache import GradCache
from tests.step.cache.encoders import KEEP, batch, models, one_graph
from tests.support.gradients import assert_same, gradients

SAMPLES_AND_CHUNKS = [(12, [4, 4]), (13, [4, 5]), (13, [13, 1]), (5, [9, 9]), (1, [1, 1])]
SAMPLES_AND_CHUNKS_IDS = [f"{n}_in_chunks_of_{image}_and_{text}" for n, (image, text) in SAMPLES_AND_CHUNKS]
DROPOUT = {"without_dropout": 0.0, "with_dropout": 0.4}


def step_and_draw(cache: GradCache, model: nn.ModuleDict, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Run a step from random seed 5, and a second one if the cache keeps some graphs only then.

    Returns its loss, and the random numbers that come next. `model` has the gradients.
    """
    for _ in range(2 if cache.keep_bytes == KEEP["keeps_some"] else 1):
        model.zero_grad()
        torch.manual_seed(5)
        value = cache.step(*inputs)
    return value, torch.rand(3)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("dropout", DROPOUT.values(), ids=DROPOUT)
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize(("n", "chunks"), SAMPLES_AND_CHUNKS, ids=SAMPLES_AND_CHUNKS_IDS)
def test_loss_and_gradient_equal_one_graphs(
    n: int, chunks: list[int], keep: float, dropout: float, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = batch(n, dtype)
    required = models(dropout, dtype)
    actual = models(dropout, dtype)
    torch.manual_seed(5)
    expected = one_graph([required["image"], required["text"]], required["head"], inputs, chunks)
    cache = GradCache([actual["image"], actual["text"]], actual["head"], chunks=chunks, keep_bytes=keep)
    value, _ = step_and_draw(cache, actual, inputs)
    assert torch.allclose(value, expected, rtol=tolerance)
    if n > 1:  # a single pair has loss 0 and no gradient to compare with
        assert_same(gradients(actual), gradients(required), tolerance)


@pytest.mark.parametrize("dropout", DROPOUT.values(), ids=DROPOUT)
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize(("n", "chunks"), SAMPLES_AND_CHUNKS, ids=SAMPLES_AND_CHUNKS_IDS)
def test_the_replay_leaves_the_random_state_where_the_first_pass_left_it(
    n: int, chunks: list[int], keep: float, dropout: float
) -> None:
    required = models(dropout)
    actual = models(dropout)
    torch.manual_seed(5)
    one_graph([required["image"], required["text"]], required["head"], batch(n), chunks)
    expected = torch.rand(3)
    cache = GradCache([actual["image"], actual["text"]], actual["head"], chunks=chunks, keep_bytes=keep)
    assert torch.equal(step_and_draw(cache, actual, batch(n))[1], expected)


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize(("n", "chunks"), SAMPLES_AND_CHUNKS, ids=SAMPLES_AND_CHUNKS_IDS)
def test_how_many_chunks_are_left_is_known_from_the_first_on(n: int, chunks: list[int], keep: float) -> None:
    model = models()
    cache = GradCache([model["image"], model["text"]], model["head"], chunks=chunks, keep_bytes=keep)
    for step in range(2):
        left: list[int] = []
        before_chunk = lambda: left.append(cache.num_chunk_passes(n) - len(left))  # noqa: B023, E731
        cache.backward(cache.loss(*cache.encode(*batch(n), before_chunk=before_chunk)))
        cache.replay(before_chunk)
        assert left == list(range(len(left), 0, -1)), f"step {step}"


@pytest.mark.parametrize("frozen", ["image", "text"])
def test_a_frozen_encoder_runs_once_and_gets_no_gradient(frozen: str) -> None:
    required = models(0.4)
    actual = models(0.4)
    calls = []
    for m in (required, actual):
        m[frozen].requires_grad_(False)
    actual[frozen].register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(5)
    one_graph([required["image"], required["text"]], required["head"], batch(12), [4, 4])
    after = torch.rand(3)
    torch.manual_seed(5)
    GradCache([actual["image"], actual["text"]], actual["head"], chunks=4).step(*batch(12))
    assert torch.equal(torch.rand(3), after), "the first pass of the last tower has drawn the last random numbers"
    assert len(calls) == 3, "three chunks, one pass"
    assert_same(gradients(actual), gradients(required), 1e-10)


def test_steps_add_their_gradients_times_the_scale() -> None:
    plain = models(dtype=torch.float32)
    scaled = models(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    GradCache([plain["image"], plain["text"]], plain["head"], chunks=4).step(*batch(12, torch.float32))
    cache = GradCache([scaled["image"], scaled["text"]], scaled["head"], chunks=4, scaler=scaler)
    for _ in range(2):
        cache.step(*batch(12, torch.float32))
    assert_same(gradients(scaled), {k: 2048 * g for k, g in gradients(plain).items()}, 1e-6)


def test_autocast_does_not_lose_gradients_between_the_passes() -> None:
    """Autocast caches cast weights; a cache filled by the pass without a graph would cut the second pass off from its
    weights.
    """
    required = models(dtype=torch.float32)
    actual = models(dtype=torch.float32)
    inputs = batch(12, torch.float32)

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def loss(m: nn.ModuleDict) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda u, v: m["head"](u.float(), v.float())

    with autocast():
        features = [
            torch.cat([required[side](rows) for rows in x.split(4)]) for side, x in zip(("image", "text"), inputs)
        ]
    loss(required)(*features).backward()
    GradCache([actual["image"], actual["text"]], loss(actual), chunks=4, autocast=autocast).step(*inputs)
    assert_same(gradients(actual), gradients(required), 2e-2)
