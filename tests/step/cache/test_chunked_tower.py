"""Modules that behave differently in two passes: batch normalisation, DDP, FSDP2 and compiled code."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from clipscale.loss.api import contrastive_loss
from clipscale.step.cache.grad_cache import GradCache
from tests.step.cache.encoders import Encoder, batch, models, one_graph
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks


def test_batch_norm_sees_the_batch_at_once_and_counts_it_once() -> None:
    """Its running mean moves by a tenth (torch's momentum), and only once."""
    m = models()
    norm = m["image"].net[1] = nn.BatchNorm1d(12).double()
    with pytest.raises(ValueError, match=r"net\.1 is batch normalisation"):
        GradCache([m["image"], m["text"]], m["head"], chunks=4).step(*batch(12))
    means: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, inputs: means.append(inputs[0].detach().mean(0)))
    GradCache([m["image"], m["text"]], m["head"], chunks=12).step(*batch(12))
    assert norm.num_batches_tracked == 1 and len(means) == 2
    torch.testing.assert_close(norm.running_mean, 0.1 * means[0])
    norm.eval()
    GradCache([m["image"], m["text"]], m["head"], chunks=4).step(*batch(12))


class Wordy(Encoder):
    """An encoder that returns more than its features."""

    def __init__(self, width: int, kind: type) -> None:
        super().__init__(width)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        rows = super().forward(x)
        return (rows, rows.square()) if self.kind is tuple else self.kind(out=rows, squares=rows.square())


def over_ranks(rank: int, ranks: int, parallel: str) -> list[dict[str, Tensor]]:
    """The gradients of encoders that return a tuple and a mapping: with no kept graph, then with all kept."""
    m = models()
    m["image"] = Wordy(7, tuple).double()
    m["text"] = Wordy(9, dict).double()
    m.load_state_dict(models().state_dict())
    for side in ("image", "text"):
        if parallel == "ddp":
            m[side] = DistributedDataParallel(m[side])
        else:
            fully_shard(m[side], mesh=init_device_mesh("cpu", (ranks,)))

    def loss(u: Tensor, v: Tensor, temperature: float) -> Tensor:
        return ranks * contrastive_loss(u, v, m["head"].log_scale.exp() / temperature)

    inputs = [x.chunk(ranks)[rank] for x in batch(12)]
    found = []
    for keep in (0, math.inf):
        m.zero_grad()
        pick = [lambda output: output[0], lambda output: output["out"]]
        cache = GradCache([m["image"], m["text"]], loss, chunks=[2, 2], keep_bytes=keep, representation=pick)
        cache.step(*inputs, temperature=0.5)
        torch.distributed.all_reduce(m["head"].log_scale.grad)
        m["head"].log_scale.grad /= ranks
        found.append({name.replace("module.", ""): gradient for name, gradient in gradients(m).items()})
    return found


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_outputs_with_more_than_features_over_ranks_have_the_gradients_of_one_graph(parallel: str) -> None:
    required = models()
    u, v = (required[side](x) for side, x in zip(("image", "text"), batch(12)))
    x = required["head"].log_scale.exp() / 0.5 * u @ v.T
    ((F.cross_entropy(x, torch.arange(12)) + F.cross_entropy(x.T, torch.arange(12))) / 2).backward()
    for each in run_ranks(over_ranks, 2, parallel):
        for found in each:
            assert_same(found, gradients(required), 1e-10)


def under_static_ddp(rank: int, ranks: int, keep: float) -> str:
    m = models()
    m["image"] = DistributedDataParallel(m["image"], static_graph=True)
    with pytest.raises(ValueError) as refused:
        GradCache([m["image"], m["text"]], m["head"], chunks=4, keep_bytes=keep).step(*batch(8))
    return str(refused.value)


@pytest.mark.parametrize("keep", [0, math.inf])
def test_ddp_with_a_static_graph_is_refused(keep: float) -> None:
    (message,) = run_ranks(under_static_ddp, 1, keep)
    assert "leave static_graph out" in message


@pytest.mark.parametrize(
    "backend", ["aot_eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "inductor"))]
)
def test_compiled_encoders_replay_their_dropout(backend: str) -> None:
    """One of two encoders is compiled, also in the oracle: a compiler's random numbers may differ from torch's, but not
    between passes."""
    torch._dynamo.reset()
    required = models(0.4)
    actual = models(0.4)
    encoders = [[torch.compile(m["image"], backend=backend), m["text"]] for m in (required, actual)]
    for seed in (5, 6):
        required.zero_grad()
        actual.zero_grad()
        torch.manual_seed(seed)
        one_graph(encoders[0], required["head"], batch(12), [4, 6])
        torch.manual_seed(seed)
        GradCache(encoders[1], actual["head"], chunks=[4, 6]).step(*batch(12))
        assert_same(gradients(actual), gradients(required), 1e-10)
