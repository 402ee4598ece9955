"""What the ranks of a step agree on before they know each other's next batch."""

from unittest.mock import patch

import pytest
import torch

from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.distributed.world import AsyncReduction, World
from clipscale.step.tower_inputs import NextStepSync, SyncResult, TowerInputs
from tests.step.steps import host_batch, run_step, small_batch, small_step
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks
from tests.support.towers import TOKENS, samples


@pytest.mark.parametrize(
    ("message", "result"),
    [
        ((0, 0, 3, 7, 9), SyncResult(3, 16, False)),
        ((1, 0, 3, 7, 0), SyncResult(None, None, False)),
        ((0, 1, 3, 7, 9), SyncResult(3, 16, True)),
        ((0, 0, 3, 0, 0), SyncResult(3, 0, False)),
    ],
)
def test_text_chunks_and_caption_labels_are_known_if_each_rank_knows_its_own(
    message: tuple[int, ...], result: SyncResult
) -> None:
    """The largest of all ranks count: whether one does not know its numbers, whether one asks for a checkpoint, chunks.
    Then comes each rank's number of caption labels."""
    assert NextStepSync(AsyncReduction(torch.tensor(message))).result == result


def test_no_labels_of_any_rank_are_known_without_another_message() -> None:
    sync = NextStepSync(AsyncReduction(torch.tensor((0, 0, 3, 0, 0))))
    inputs = TowerInputs(ONE_RANK, stays_on_device=False, sorts_captions=True, next_step_sync=sync)
    with patch.object(World, "all_reduce_max", side_effect=AssertionError("another message")):
        assert inputs.num_caption_labels(local_labels=5) == 0


@pytest.mark.parametrize(("has_arrived", "messages"), [(True, 0), (False, 1)])
def test_a_step_asks_for_the_number_of_text_chunks_only_if_the_last_one_did_not_learn_it(
    has_arrived: bool, messages: int
) -> None:
    step = small_step()
    batch = small_batch()
    run_step(step, batch, upcoming=batch if has_arrived else None)
    with patch.object(World, "all_reduce_max", autospec=True, side_effect=World.all_reduce_max) as asked:
        run_step(step, batch)
    assert asked.call_count == messages


def test_captions_that_have_arrived_early_are_sorted_once() -> None:
    step = small_step()
    batches = small_batch(seed=1), small_batch(seed=2)
    with patch.object(SortedTexts, "__init__", autospec=True, side_effect=SortedTexts.__init__) as made:
        run_step(step, batches[0], upcoming=batches[1])
        run_step(step, batches[1])
    assert made.call_count == 2


def test_the_captions_of_another_batch_are_not_taken() -> None:
    """The ranks have agreed on a batch, and its captions are sorted already."""
    step = small_step()
    batches = [small_batch(seed=seed) for seed in (1, 2, 3)]
    run_step(step, batches[0], upcoming=batches[1])
    with pytest.raises(AssertionError, match="agreed on another batch"):
        run_step(step, batches[2])


def test_captions_in_chunks_of_another_size_are_not_taken() -> None:
    step = small_step()
    batch = small_batch()
    run_step(step, batch, upcoming=batch)
    step.cache.chunks[1] += 1
    with pytest.raises(AssertionError, match="chunks of another size"):
        run_step(step, batch)


def second_step_with_a_late_rank(rank: int, world_size: int) -> tuple[float, int]:
    """The second step's loss and text chunks, where rank 1's batch had not arrived in the first.

    Rank 0 makes 2 chunks of its short captions, rank 1 makes 3 of its long ones.
    """
    step = small_step(world=World(rank, world_size, torch.device("cpu")), parallel="zero3", chunk=2)
    pixels, tokens = samples(6, seed=rank)
    batch = host_batch(pixels, tokens.masked_fill(torch.arange(TOKENS) >= (5, TOKENS)[rank], 0))
    run_step(step, batch, upcoming=None if rank else batch)
    result = run_step(step, batch)
    return result.scalars.loss, len(step.cache.towers[1].spans)


def test_ranks_make_equally_many_text_chunks_where_one_did_not_know_its_number() -> None:
    """Under FSDP2 a rank that makes fewer waits for the others for ever."""
    (loss, chunks), (other, same) = run_ranks(second_step_with_a_late_rank, 2)
    assert loss == other and chunks == same == 3
