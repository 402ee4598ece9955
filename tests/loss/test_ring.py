"""The ring at any number of ranks: bytes and hops counted, blocks that are joined, and transfers that overlap the blocks' computation."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from clipscale import contrastive_loss
from clipscale.config.sections import OBJECTIVES, LossConfig
from clipscale.loss import api
from clipscale.loss.exchange import BLOCK, WAIT, Communicator, Ring
from clipscale.loss.inputs import checked_inputs
from clipscale.plan.memory_tracker import DryMachine
from tests.loss.cases import assert_exact, keys, oracle
from tests.loss.ring import COLS, NODE, Span, leaves_the_node, memory_of, sent_by, timeline
from tests.loss.workers import Workers, check, local_results, stacked, stacked_again, whole
from tests.support.ranks import run_ranks

WIDTH = 512


# ---- bytes ----


def per_feature(sent: int, size: int) -> float:
    """Of bytes that were sent with COLS columns a rank: bytes for each number of the columns of all ranks."""
    return sent / (size * COLS * WIDTH)


@pytest.mark.parametrize("per_node", [None, NODE])
@pytest.mark.parametrize("size", [8, 64])
def test_bytes_and_hops_at_any_number_of_ranks(size: int, per_node: int | None) -> None:
    """A feature is sent P - 1 times in bfloat16 in each sweep, its gradient P times in float32. Sums of columns are small."""
    for sigmoid, sweeps in ((False, 2), (True, 1)):
        sent = sent_by(0, size, per_node, WIDTH, sigmoid=sigmoid)
        features_, sums = ([one for one in sent if one.is_sums == is_sums] for is_sums in (False, True))
        assert (len(features_), len(sums)) == (sweeps * (size - 1), sweeps * size)
        expected, found = sweeps * 2 * (size - 1) / size + 4, per_feature(sum(one.bytes for one in sent), size)
        assert expected <= found < 1.01 * expected + 8 * 3 / WIDTH
        assert found <= (6.0 if sigmoid else 9.0)


@pytest.mark.slow  # seconds
@pytest.mark.parametrize("size", [512, 1024, 2048, 4096])
def test_bytes_and_hops_at_thousands_of_ranks(size: int) -> None:
    test_bytes_and_hops_at_any_number_of_ranks(size, NODE)


def test_two_levels_divide_what_leaves_a_node_among_its_ranks() -> None:
    """In one ring the last rank of a node sends everything out of it; in two levels each rank sends an eighth."""
    size, ends = 32, (0, NODE - 1)
    one_ring = [leaves_the_node(rank, sent_by(rank, size, None, WIDTH)) for rank in ends]
    levels = [leaves_the_node(rank, sent_by(rank, size, NODE, WIDTH)) for rank in ends]
    assert one_ring[0] == 0 and levels[0] == levels[1]
    assert 0.8 < NODE * levels[0] / one_ring[1] < 1.05


@pytest.mark.parametrize(("size", "per_node"), [(8, None), (64, None), (64, NODE)])
def test_joined_blocks_send_the_same_features_and_at_most_seven_blocks_of_sums_more(
    size: int, per_node: int | None
) -> None:
    alone = sent_by(3, size, per_node, WIDTH)
    for blocks in (2, 4, 8):
        sent = sent_by(3, size, per_node, WIDTH, blocks)
        count = [sum(one.bytes for one in x if not one.is_sums) for x in (alone, sent)]
        assert count[0] == count[1], "bytes of features"
        more = sum(one.bytes for one in sent) - sum(one.bytes for one in alone)
        assert more <= (blocks - 1) * COLS * (WIDTH * 4 + 8)
        assert len(sent) < len(alone) / blocks + 12, "transfers"
        if per_node:
            assert leaves_the_node(3, sent) <= leaves_the_node(3, alone) + (blocks - 1) * COLS * (WIDTH * 4 + 8)


@pytest.mark.slow  # seconds of tensors without memory
def test_a_ranks_memory_falls_with_their_number() -> None:
    """Of a million pairs, beyond features and gradients: blocks of columns with their gradients, and panels of 512 MiB."""
    sizes = [memory_of(size, 2**20, 768) / 2**30 for size in (8, 32)]
    assert sizes[0] < 2.1 and sizes[1] < 1.0, sizes


def sent_in_a_step(
    group: dist.ProcessGroup,
    rank: int,
    options: dict[str, Any],
    blocks: int = 1,
    trained: tuple[bool, bool] = (True, True),
) -> int:
    u, v = (torch.randn(COLS, WIDTH).bfloat16().requires_grad_(x) for x in trained)
    before = Communicator.bytes_sent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_blocks_at_once", lambda *_: blocks)
        contrastive_loss(u, v, 10.0, group=group, exchange="ring", **options).backward()
    return Communicator.bytes_sent - before


def assert_counted(found: list[int], options: dict[str, Any], blocks: int) -> None:
    size, per_node, sigmoid = len(found), options.get("ranks_per_node"), options.get("objective") == "sigmoid"
    for rank, sent in enumerate(found):
        counted = sum(one.bytes for one in sent_by(rank, size, per_node, WIDTH, blocks, sigmoid))
        agreement = 100 * size  # the ranks compare their inputs' sizes, and add up the value
        assert counted <= sent < counted + agreement, (
            f"rank {rank} of {size}: {sent} bytes, of which {counted} by count"
        )


@pytest.mark.parametrize("per_node", [None, 2])
@pytest.mark.parametrize(("blocks", "objective"), [(1, "softmax"), (2, "softmax"), (1, "sigmoid")])
def test_real_ranks_send_what_is_counted(ranks: Workers, blocks: int, objective: str, per_node: int | None) -> None:
    for world in (2, 4):
        options = {"ranks_per_node": per_node, "objective": objective}
        assert_counted(ranks.run(sent_in_a_step, world, options, blocks), options, blocks)


def test_frozen_texts_send_no_gradients(ranks: Workers) -> None:
    found = [per_feature(sent, 4) for sent in ranks.run(sent_in_a_step, 4, {}, 1, (True, False))]
    assert max(found) < 3.5, f"bytes of each number: {found}, 3 of which are the features' two rounds"


# ---- many ranks, and joined blocks ----


def joined_results(wishes: list[int], group: dist.ProcessGroup | None, rank: int, *given: Any) -> list[torch.Tensor]:
    """This rank's results where it asks for so many blocks at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_blocks_at_once", lambda *_: wishes[rank % len(wishes)])
        return local_results(group, rank, *given)


@pytest.mark.parametrize(
    ("world", "per_node"),
    [(2, None), (3, None), (4, 2)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (2, 2), (3, 1), (3, 2), (4, None), (4, 1))],
)
def test_joined_blocks_are_exact(ranks: Workers, world: int, per_node: int | None) -> None:
    if world % (per_node or 1):
        return
    for objective, wishes, m in itertools.product(OBJECTIVES, ([2], [8], [1, 2]), (5, 7)):
        u, v = stacked(world, 5, m, 8)
        drawn = keys(world * 5, world * m)
        images, texts = drawn["image_keys"].view(world, 5), stacked_again(drawn["text_keys"], world, 5)
        options = {"objective": objective, "ranks_per_node": per_node, "tile": 4, "exchange": "ring"}
        local = partial(joined_results, wishes)
        check(ranks, world, u, v, 14.3, options, {"image_keys": images}, {"text_keys": texts}, local=local)


def on_many(rank: int, world: int, u: torch.Tensor, v: torch.Tensor, options: dict[str, Any], blocks: int) -> Any:
    group = dist.group.WORLD
    sent = sent_in_a_step(group, rank, options, blocks)
    return joined_results([blocks], group, rank, u, v, 14.3, {}, options | {"exchange": "ring"}), sent


@pytest.mark.slow  # sixteen processes
@pytest.mark.parametrize(("world", "per_node", "blocks"), [(8, 4, 1), (8, 2, 4), (16, 8, 1), (16, 4, 2), (16, None, 8)])
def test_eight_and_sixteen_real_ranks_are_exact_and_send_what_is_counted(
    world: int, per_node: int | None, blocks: int
) -> None:
    u, v = stacked(world, 3, 3, 8)
    options = {"ranks_per_node": per_node}
    answers = run_ranks(on_many, world, u, v, options, blocks)
    found = whole([answer for answer, _ in answers])
    found[1:3] = (x.flatten(0, 1) for x in found[1:3])
    assert_exact(found, oracle(u.flatten(0, 1), v.flatten(0, 1), 14.3), 14.3, 1e-10, (world, per_node, blocks))
    assert_counted([sent for _, sent in answers], options, blocks)


@pytest.mark.parametrize(("n", "blocks"), [(256, 66), (1024, 5), (2048, 2), (4096, 1)])
def test_blocks_are_joined_where_one_has_fewer_tiles_than_the_gpu_has_multiprocessors(n: int, blocks: int) -> None:
    u, v = (torch.zeros(n, 8, dtype=torch.bfloat16) for _ in range(2))
    inputs, gpu = checked_inputs(u, v, 1.0, 0.0, (None, None), (None, None), "dot"), DryMachine(90)
    assert api._blocks_at_once("triton", inputs, LossConfig(), gpu) == blocks
    assert api._blocks_at_once("tiled", inputs, LossConfig(), gpu) == 1


@pytest.mark.parametrize(
    ("size", "per_node", "wish", "joined"),
    [
        (8, None, 1, 1),
        (8, None, 3, 4),
        (6, None, 8, 2),
        (7, None, 8, 1),
        (64, 8, 66, 8),
        (24, 8, 8, 1),
        (2, None, 2, 2),
    ],
)
def test_as_many_blocks_are_joined_as_divide_the_ranks(size: int, per_node: int | None, wish: int, joined: int) -> None:
    ring = Ring(cast(Communicator, SimpleNamespace(rank=0, size=size)), per_node)
    ring.join(wish)
    assert (ring.joined, ring.visits) == (joined, size // joined)


# ---- overlap ----


def waits(spans: list[Span]) -> list[float]:
    """But for the last, after which nothing is left to compute."""
    return [end - start for name, start, end in spans if name == WAIT][:-1]


def timelines(group: dist.ProcessGroup, rank: int) -> tuple[list[Span], list[Span]]:
    alone = timeline(group, 4, 0.0)
    longest = torch.tensor(max(waits(alone)))
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return alone, timeline(group, 4, max(0.03, 3e-3 * float(longest)))


def test_a_hop_is_under_way_while_its_block_is_computed(ranks: Workers) -> None:
    """In the trace every transfer of features begins before a block and ends after it."""
    for _, overlapped in ranks.run(timelines, 4):
        blocks = [span for span in overlapped if span[0] == BLOCK]
        assert len(blocks) == 4
        for _, start, end in blocks[:-1]:
            around = {name for name, a, b in overlapped if name.startswith("gloo") and a <= start and b >= end}
            assert around == {"gloo:send", "gloo:recv"}, f"during the block of {start:.1f} to {end:.1f} ms: {around}"


@pytest.mark.slow  # times, on a machine of one's own
def test_what_a_hop_takes_alone_is_not_waited_for(ranks: Workers) -> None:
    for alone, overlapped in ranks.run(timelines, 4):
        assert sum(waits(overlapped)) < 0.5 * sum(waits(alone)), f"{waits(overlapped)} against {waits(alone)} ms"
