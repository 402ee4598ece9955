"""With a loss of single samples beside the batch's, GradCache's gradient equals one graph's, and decoders run once."""

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from clipscale import ChunkOutput, GradCache, contrastive_loss
from clipscale.common.rng import RandomState
from clipscale.distributed.parallel import wrap
from clipscale.distributed.world import World
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks

N = 13
TOKENS = 6
VOCABULARY = 17
WIDTH = 5
CPU = torch.device("cpu")


class Pairs(nn.Module):
    """Both towers and a decoder, with dropout in all of them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, WIDTH))
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.text = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, WIDTH))
        self.decoder = nn.Sequential(
            nn.Linear(12 + WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, VOCABULARY)
        )

    def features(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Image and text features (N, 2, D), the image's own before it has length 1, and the embedded tokens."""
        image = self.image(pixels)
        embedded = self.embedding(tokens)
        return F.normalize(torch.stack([image, self.text(embedded.mean(1))], 1), dim=-1), image, embedded

    def cross_entropy(self, image: Tensor, embedded: Tensor, tokens: Tensor) -> Tensor:
        """The sum over the caption's tokens, without pads, which are 0."""
        inputs = torch.cat([embedded[:, :-1], image.unsqueeze(1).expand(-1, TOKENS - 1, -1)], -1)
        return F.cross_entropy(
            self.decoder(inputs).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0, reduction="sum"
        )

    def forward(self, pixels: Tensor, tokens: Tensor) -> Any:
        features, image, embedded = self.features(pixels, tokens)
        if not torch.is_grad_enabled():
            return features
        return ChunkOutput(features, self.cross_entropy(image, embedded, tokens))


def model_of(dropout: float, dtype: torch.dtype = torch.float64) -> Pairs:
    torch.manual_seed(0)
    return Pairs(dropout).to(dtype)


@cache
def batch(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (n, TOKENS), generator=g)
    tokens *= torch.arange(TOKENS) < torch.randint(2, TOKENS + 1, (n, 1), generator=g)
    return torch.randn(n, 7, generator=g, dtype=torch.float64), tokens


def contrast(features: Tensor) -> Tensor:
    x = 5.0 * features[:, 0] @ features[:, 1].T
    target = torch.arange(len(x))
    return (F.cross_entropy(x, target) + F.cross_entropy(x.T, target)) / 2


def one_graph(model: Pairs, chunk: int, kept: int, weight: float) -> tuple[Tensor, Tensor]:
    """The contrastive loss and the sum of cross entropies, in one graph.

    It goes chunk by chunk for the order of random numbers: a decoder in the second pass uses those with which the first
    pass of the next chunk begins.
    """
    rows = []
    total = torch.zeros((), dtype=torch.float64)
    for i, (pixels, tokens) in enumerate(zip(*(x.split(chunk) for x in batch()))):
        features, image, embedded = model.features(pixels, tokens)
        after = RandomState.now()
        total = total + model.cross_entropy(image, embedded, tokens)
        if i >= kept:
            after.restore()
        rows.append(features)
    value = contrast(torch.cat(rows))
    (value + weight * total).backward()
    return value.detach(), total.detach()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("chunk", [1, 4, N, 20])
@pytest.mark.parametrize("keep", [0, 20e3, math.inf])
def test_gradient_and_value_are_those_of_one_graph(keep: float, chunk: int, dropout: float) -> None:
    actual = model_of(dropout)
    calls: list[bool] = []
    actual.decoder.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    cached = GradCache([actual], contrast, chunks=chunk, keep_bytes=keep)
    if cached.keep_bytes not in (0, math.inf):  # the first step measures a graph
        cached.step(batch())
    actual.zero_grad()
    calls.clear()
    torch.manual_seed(5)
    value = cached.step(batch())
    (kept,) = cached.num_kept_graphs
    assert keep != 20e3 or chunk != 4 or 0 < kept < 4, "some graphs"
    required = model_of(dropout)
    torch.manual_seed(5)
    contrastive, total = one_graph(required, chunk, kept, 1.0)
    assert cached.chunk_loss is not None
    assert torch.allclose(cached.chunk_loss, total, rtol=1e-12) and torch.allclose(
        value, contrastive + total, rtol=1e-12
    )
    assert_same(gradients(actual), gradients(required), 1e-10)
    assert calls == [True] * math.ceil(N / min(chunk, N)), "the decoder has one pass"


def test_the_chunks_losses_have_a_weight_that_may_be_known_late() -> None:
    """A mean over tokens that are counted meanwhile has such a weight. Kept graphs take it, too."""
    for keep in (0.0, math.inf):
        actual = model_of(0.4)
        required = model_of(0.4)
        torch.manual_seed(5)
        cached = GradCache([actual], contrast, chunks=4, keep_bytes=keep)
        cached.backward(contrast(*cached.encode(batch())))
        cached.replay(chunk_loss_weight=0.25)
        torch.manual_seed(5)
        _, total = one_graph(required, 4, cached.num_kept_graphs[0], 0.25)
        assert cached.chunk_loss is not None and torch.allclose(cached.chunk_loss, total, rtol=1e-12)
        assert_same(gradients(actual), gradients(required), 1e-10)


def test_a_scaler_scales_both_losses_and_no_value() -> None:
    required = model_of(0.0, torch.float32)
    actual = model_of(0.0, torch.float32)
    pixels, tokens = batch()
    inputs = pixels.float(), tokens
    plain = GradCache([required], contrast, chunks=4).step(inputs)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    value = GradCache([actual], contrast, chunks=4, scaler=scaler).step(inputs)
    assert torch.equal(value, plain)
    assert_same(gradients(actual), {name: 1024 * g for name, g in gradients(required).items()}, 1e-6)


def test_a_chunks_loss_that_is_scaled_already_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    linear = nn.Linear(4, 3)

    def penalised(x: Tensor) -> ChunkOutput:
        return ChunkOutput(linear(x), scaler.scale(linear(x).square().sum()))

    cache = GradCache([penalised, linear], lambda u, v: (u @ v.T).logsumexp(1).sum(), chunks=3, scaler=scaler)
    with pytest.raises(ValueError, match=r"the loss ends in scaler\.scale\(\.\.\.\)"):
        cache.step(torch.randn(10, 4), torch.randn(10, 4))


def test_several_towers_add_their_losses_and_one_without_is_as_ever() -> None:
    torch.manual_seed(0)
    pair = nn.ModuleDict({name: nn.Linear(4, 3, bias=False) for name in ("first", "second")}).double()
    first = pair["first"]
    second = pair["second"]
    x = torch.randn(10, 4, dtype=torch.float64)

    def penalised(x: Tensor) -> ChunkOutput:
        return ChunkOutput(first(x), first(x).square().sum())  # also without a graph, where it is not used

    def loss(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(u @ v.T + w @ w.T, torch.arange(10))

    value = loss(first(x), second(x), first(x)) + 2 * first(x).square().sum()
    value.backward()
    expected = gradients(pair)
    pair.zero_grad()
    cached = GradCache([penalised, second, penalised], loss, chunks=3)
    assert torch.allclose(cached.step(x, x, x), value)
    assert_same(gradients(pair), expected, 1e-10)
    plain = GradCache([second, second], lambda u, v: (u @ v.T).logsumexp(1).sum(), chunks=3)
    plain.step(x, x)
    assert plain.chunk_loss is None


def test_frozen_towers_leave_the_decoder_to_train_alone() -> None:
    """The representations have no graph then."""
    required = model_of(0.0)
    actual = model_of(0.0)
    for model in (required, actual):
        model.requires_grad_(False)
        model.decoder.requires_grad_(True)
    one_graph(required, N, 0, 1.0)
    GradCache([actual], contrast, chunks=4).step(batch())
    assert_same(gradients(actual), gradients(required), 1e-10)


def test_representation_maps_the_representations_alone() -> None:
    required = nn.Linear(4, 3).double()
    actual = nn.Linear(4, 3).double()
    required.load_state_dict(actual.state_dict())
    x = torch.randn(10, 4, dtype=torch.float64)

    def loss(u: Tensor) -> Tensor:
        return (u @ u.T).logsumexp(1).sum()

    (loss(2 * required(x)) + required(x).square().sum()).backward()
    encoder = lambda x: ChunkOutput({"out": actual(x)}, actual(x).square().sum())  # noqa: E731
    GradCache([encoder], loss, chunks=3, representation=lambda out: 2 * out["out"]).step(x)
    assert_same(gradients(actual), gradients(required), 1e-10)


def test_a_loss_of_each_sample_is_refused() -> None:
    layer = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"ChunkOutput: .* not \(2,\)"):
        GradCache([lambda x: ChunkOutput(layer(x), layer(x).sum(1))], torch.sum, chunks=2).step(torch.ones(4, 4))


def gradients_of_rank(rank: int, ranks: int, parallel: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The sum of this rank's chunks' losses, and the gradients, for each memory for kept graphs."""
    found = []
    for keep in KEEPS:
        model = model_of(0.0)
        averaged = ranks if parallel in AVERAGES else 1
        encoder = (
            AVERAGES[parallel](model) if averaged > 1 else wrap(World(rank, ranks, CPU), model, parallel, torch.float32)
        )
        exchange = "ring" if ranks == 3 else "gather"

        def loss(features: Tensor, averaged: int = averaged, exchange: str = exchange) -> Tensor:
            return averaged * contrastive_loss(features[:, 0], features[:, 1], 5.0, exchange=exchange)

        own = tuple(x[rank * 12 // ranks : (rank + 1) * 12 // ranks] for x in batch(12))
        cached = GradCache([encoder], loss, chunks=5 if ranks < 3 else 3, keep_bytes=keep)
        for _ in range(2 if 0 < keep < math.inf else 1):
            model.zero_grad()
            cached.backward(cached.loss(*cached.encode(own)))
            cached.replay(chunk_loss_weight=0.1 * averaged)
        assert cached.chunk_loss is not None
        found.append((cached.chunk_loss, gradients(model)))
    return found


KEEPS = (0, 30e3, math.inf)
# torch's own, whose gradients are means over ranks.
AVERAGES: dict[str, Any] = {"DDP": DistributedDataParallel, "FSDP2": fully_shard}


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        *[("ddp", 3), ("zero3", 2)],
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("zero2", 2), ("zero3", 3), ("DDP", 2), ("FSDP2", 3))
        ),
    ],
)
def test_ranks_have_the_gradient_of_one_graph_over_all_samples(parallel: str, ranks: int) -> None:
    required = model_of(0.0)
    features, image, embedded = required.features(*batch(12))
    total = required.cross_entropy(image, embedded, batch(12)[1])
    (contrast(features) + 0.1 * total).backward()
    of_ranks = run_ranks(gradients_of_rank, ranks, parallel)
    for kept in zip(*of_ranks, strict=True):
        assert torch.allclose(sum(value for value, _ in kept), total, rtol=1e-12)
        for _, found in kept:
            assert_same(found, gradients(required), 1e-10)
