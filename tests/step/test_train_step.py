"""What the ranks of a step agree on before they know each other's next batch; and a step that fp16 skips."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from clipscale.config.sections import CacheConfig, LaunchConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.distributed.world import AsyncReduction, World
from clipscale.step.batch_passes import StepAgreement
from clipscale.step.train_step import StepNumbers, TrainStep
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks
from tests.support.runs import four_step_config, loop_with_batches


@pytest.mark.parametrize(
    ("message", "chunks", "labels", "save"),
    [((3, 0, 0, 7, 9), 3, 16, False), ((3, 1, 0, 7, 0), 0, 0, False), ((3, 0, 1, 7, 9), 3, 16, True)],
)
def test_text_chunks_and_caption_labels_are_known_if_each_rank_knows_its_own(
    message: tuple[int, ...], chunks: int, labels: int, save: bool
) -> None:
    """The largest of all ranks count: chunks, whether one does not know its own, whether one wishes to save. Then comes
    each rank's number of caption labels."""
    agreement = StepAgreement(AsyncReduction(torch.tensor(message)))
    assert (agreement.num_text_chunks, agreement.num_caption_labels, agreement.wants_save) == (chunks, labels, save)


def test_captions_that_have_arrived_early_are_sorted_once(shards: str, tmp_path: Path) -> None:
    run = loop_with_batches(four_step_config(shards, tmp_path / "run", precision="fp32"), ONE_RANK, batches=2)
    with patch.object(SortedTexts, "__init__", autospec=True, side_effect=SortedTexts.__init__) as made:
        for _ in range(2):
            run.run_step()
    run.stream.close()
    assert made.call_count == 2


def second_step_with_a_late_rank(rank: int, world_size: int, config: TrainConfig) -> tuple[float, int]:
    """The second step's loss and text chunks, where rank 1's batch had not arrived in the first, and is of longer
    captions."""
    run = loop_with_batches(config, World(rank, world_size, torch.device("cpu")), batches=2 - rank)
    run.run_step()
    run.train_step.cache.chunks[1] -= rank
    run.run_step()
    run.stream.close()
    return run.loss, len(run.train_step.cache.towers[1].spans)


@pytest.mark.slow
def test_ranks_make_equally_many_text_chunks_where_one_did_not_know_its_number(shards: str, tmp_path: Path) -> None:
    config = four_step_config(
        shards,
        tmp_path / "run",
        precision="fp32",
        launch=LaunchConfig(parallel="zero3"),
        cache=CacheConfig(chunk=["6", "2"]),
    )
    (loss, chunks), (other, same) = run_ranks(second_step_with_a_late_rank, 2, config)
    assert loss == other and chunks == same == 6


def test_with_fp16_an_infinite_loss_with_finite_gradients_ends_no_run() -> None:
    """Its gradients decide alone, even where the loss scale cannot become lower."""
    numbers = StepNumbers(loss=math.inf, captioner_losses={}, grad_norm=1.0)
    step: Any = SimpleNamespace(
        trainable_parameters=[], precision=SimpleNamespace(scaler=object(), can_lower_loss_scale=False), updates=[]
    )
    step.sum_and_unscale_gradients = lambda: None
    step.read_numbers = lambda losses, norm: numbers
    step.raise_failure_or_divergence = TrainStep.raise_failure_or_divergence
    step.update = lambda norm, overflows: step.updates.append(overflows)
    stream: Any = SimpleNamespace(failure=None)
    assert TrainStep.check_and_update(step, [], stream, 3) is numbers
    assert step.updates == [False]
