"""When a step updates the weights, and what it undoes after an error."""

import copy
import math
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from clipscale.common.errors import DataError, UserError
from clipscale.distributed.world import World
from clipscale.step import train_step
from clipscale.step.ema import WeightEma
from clipscale.step.train_step import TrainStep
from tests.step.steps import ArrivedStream, host_batch, run_step, small_batch, small_step
from tests.support.ranks import run_ranks
from tests.support.towers import samples


def checkpoints_asked_for(rank: int, world_size: int) -> list[bool]:
    """Whether the result asks for a checkpoint: of a step in which no rank does, and of one in which rank 1 does."""
    step = small_step(world=World(rank, world_size, torch.device("cpu")))
    return [run_step(step, small_batch(), wants_save=wants_save).wants_save for wants_save in (False, rank == 1)]


def test_the_result_of_a_step_says_whether_any_rank_asks_for_a_checkpoint() -> None:
    assert run_ranks(checkpoints_asked_for, 2) == [[False, True]] * 2


def test_a_step_that_is_thrown_away_leaves_nothing_of_the_batch_after_it() -> None:
    step = small_step()
    batches = [small_batch(seed=seed) for seed in (1, 2, 3)]
    stream = ArrivedStream(batches[1], DataError("gone"))
    with pytest.raises(DataError), step.rollback_on_error(stream):
        run_step(step, batches[0], stream=stream)
    assert stream.num_discarded == 1
    assert run_step(step, batches[2]).scalars == run_step(small_step(), batches[2]).scalars


def test_a_rollback_restores_random_numbers_and_the_statistics_of_batch_normalisation() -> None:
    step = small_step()
    norm = torch.nn.BatchNorm1d(3)
    step.model.add_module("norm", norm)
    with step.rollback_on_error(ArrivedStream()):  # this step is complete
        norm(torch.rand(8, 3))
    random, statistics = torch.get_rng_state(), copy.deepcopy(norm.state_dict())
    assert statistics["num_batches_tracked"] == 1
    with pytest.raises(DataError), step.rollback_on_error(ArrivedStream()):
        norm(torch.rand(8, 3))
        raise DataError("gone")
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(norm.state_dict(), statistics, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("part", "keep", "fails_at"), [("encode", math.inf, 5), ("statistics", 0, 7), ("loss", 0, 7), ("replay", 0, 8)]
)
def test_a_step_without_memory_frees_its_memory_before_the_run_saves(
    part: str, keep: float, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is alive while the run saves, and so are the frames of the functions that it has ended."""
    step = small_step()
    stream = Mock()
    made: list[weakref.ref[Tensor]] = []

    def fail(features: Tensor) -> Tensor:
        made.append(weakref.ref(features))
        if len(made) >= fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return features

    step.cache.keep_bytes = keep
    for tower in step.cache.towers:  # of 3 chunks each
        tower.representation = fail
    if part == "statistics":
        monkeypatch.setattr(train_step, "start_statistics", lambda images, texts: fail(images))
    if part == "loss":
        step.cache.loss = lambda images, texts, **options: fail(images)
    with pytest.raises(UserError, match=f"out of memory in {part}") as raised, step.rollback_on_error(stream):
        try:
            run_step(step, small_batch())
        finally:
            assert any(ref() is not None for ref in made)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert len(made) >= fails_at and all(ref() is None for ref in made)
    assert all(len(tower.representations) == 0 for tower in step.cache.towers)


def make_loss_infinite(step: TrainStep) -> None:
    """Let the loss of the step be infinite, with the same gradients."""
    loss = step.cache.loss
    step.cache.loss = lambda *features, **options: loss(*features, **options) + math.inf


def weights(step: TrainStep) -> list[Tensor]:
    return [weight.detach().clone() for weight in step.trainable_parameters]


def is_updated(step: TrainStep, before: list[Tensor]) -> bool:
    """Whether any weight has changed."""
    return not all(torch.equal(weight, old) for weight, old in zip(step.trainable_parameters, before, strict=True))


def test_a_step_updates_the_weights() -> None:
    step = small_step()
    before = weights(step)
    run_step(step, small_batch())
    assert is_updated(step, before)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_update_clips_the_unscaled_gradient_and_bounds_the_logit_scale(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_step, "MAX_LOGIT_SCALE", 3.0)
    step = small_step(precision)
    step.clip_norm = 0.25
    before = weights(step)
    norm = run_step(step, small_batch()).scalars.grad_norm
    assert norm > 0.25
    clipped = [p.grad for p in step.trainable_parameters if p.grad is not None]
    assert torch.nn.utils.get_total_norm(clipped).item() == pytest.approx(0.25, rel=1e-4)
    assert step.model.logit_scale.exp().item() == pytest.approx(3.0)
    for p, old in zip(step.trainable_parameters, before, strict=True):
        if p is not step.model.logit_scale and p.grad is not None:
            torch.testing.assert_close(p.detach(), old - 0.1 * p.grad)


def updated_on_ranks(rank: int, world_size: int, precision: str) -> tuple[float, dict[str, Tensor]]:
    """The gradient norm of a step over this rank's share of 12 samples, and how the step changes the weights."""
    step = small_step(precision, world=World(rank, world_size, torch.device("cpu")), bias=-2.0)
    if step.precision.scaler:  # with the scale of a new run a share overflows
        step.precision.scaler.load_state_dict(step.precision.scaler.state_dict() | {"scale": 1024.0})
    pixels, tokens = (rows.chunk(world_size)[rank] for rows in samples(12))
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    norm = run_step(step, host_batch(pixels, tokens)).scalars.grad_norm
    return norm, {name: p.detach() - before[name] for name, p in step.model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_ranks_update_the_weights_as_one_rank_with_both_shares(precision: str) -> None:
    """The logit scale and the bias, too, whose gradients no tower's replay sums."""
    norm, expected = updated_on_ranks(0, 1, precision)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for found_norm, found in run_ranks(updated_on_ranks, 2, precision):
        assert found_norm == pytest.approx(norm, rel=tolerance)
        for name, update in expected.items():
            difference = (found[name] - update).norm() / update.norm()
            assert difference < tolerance, f"{name}: {difference:.1e} of the update"


def test_an_infinite_loss_ends_the_run_before_the_update() -> None:
    step = small_step()
    make_loss_infinite(step)
    before = weights(step)
    with pytest.raises(UserError, match=r"^step 7: loss=inf, gradient norm=[\d.]+: training has diverged"):
        run_step(step, small_batch(), number=7)
    assert not is_updated(step, before) and not step.is_updating


def test_with_fp16_an_infinite_loss_with_finite_gradients_ends_no_run() -> None:
    """Its gradients decide alone, even where the loss scale cannot become lower."""
    step = small_step("fp16")
    make_loss_infinite(step)
    scaler = step.precision.scaler
    assert scaler is not None
    scaler.load_state_dict(scaler.state_dict() | {"scale": 0.5})
    before = weights(step)
    assert run_step(step, small_batch()).scalars.loss == math.inf
    assert is_updated(step, before) and not step.precision.can_lower_loss_scale


def test_a_step_whose_stream_has_failed_updates_nothing() -> None:
    step = small_step()
    before = weights(step)
    with pytest.raises(DataError, match="no usable sample"):
        run_step(step, small_batch(), failure=DataError("no usable sample"))
    assert not is_updated(step, before)


def test_a_failed_evaluation_puts_the_trained_weights_back_and_shards_them(monkeypatch: pytest.MonkeyPatch) -> None:
    step = small_step()
    step.ema = WeightEma(0.5, step.model)
    run_step(step, small_batch())
    before = weights(step)
    sharded: list[bool] = []
    monkeypatch.setattr(train_step, "reshard", lambda model: sharded.append(not is_updated(step, before)))
    with pytest.raises(DataError), step.weights_for_evaluation(uses_ema=True):
        assert is_updated(step, before)
        raise DataError("a set is gone")
    assert sharded == [True]


def test_an_evaluation_without_the_average_has_the_trained_weights() -> None:
    step = small_step()
    step.ema = WeightEma(0.5, step.model)
    run_step(step, small_batch())
    before = weights(step)
    with step.weights_for_evaluation(uses_ema=False):
        assert not is_updated(step, before)
