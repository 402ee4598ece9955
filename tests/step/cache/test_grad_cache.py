"""The gradient cache gives the gradient of one graph over the whole batch."""

import copy
import math
from collections import UserDict
from collections.abc import Callable
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
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks


class Encoder(nn.Module):
    """A small encoder with dropout and a module whose use of parameters is not linear."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=-1)


class ClipHead(nn.Module):
    """The symmetric softmax loss of one process, with a learnable scale, written without clipscale."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = self.log_scale.exp() * u @ v.T
        target = torch.arange(len(u), device=u.device)
        return (F.cross_entropy(x, target) + F.cross_entropy(x.T, target)) / 2


def models(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"image": Encoder(7, dropout), "text": Encoder(9, dropout), "head": ClipHead()}).to(dtype)


def batch(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 7, generator=generator, dtype=dtype), torch.randn(n, 9, generator=generator, dtype=dtype)


def one_graph(
    encoders: list[nn.Module], loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], chunks: list[int]
) -> Tensor:
    """Forward and backward of everything in one graph; chunk by chunk only in the order in which random numbers are
    drawn.
    """
    features = [torch.cat([e(rows) for rows in x.split(c)]) for e, x, c in zip(encoders, inputs, chunks, strict=True)]
    value = loss(*features)
    value.backward()
    return value.detach()


# Bytes of kept graphs; with 4000 a second step keeps some of them, after a first one has measured their size.
KEEP = {"keeps_none": 0, "keeps_some": 4000, "keeps_all": math.inf}
SAMPLES_AND_CHUNKS = [(12, [4, 4]), (13, [4, 5]), (13, [13, 1]), (5, [9, 9]), (1, [1, 1])]
SAMPLES_AND_CHUNKS_IDS = [f"{n}_in_chunks_of_{image}_and_{text}" for n, (image, text) in SAMPLES_AND_CHUNKS]
DROPOUT = {"without_dropout": 0.0, "with_dropout": 0.4}


def step_and_draw(cache: GradCache, model: nn.ModuleDict, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A step from random seed 5, or a second one if the cache then keeps some graphs: its loss, and the next random
    numbers. `model` has the gradients."""
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
    required, actual = models(dropout, dtype), models(dropout, dtype)
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
        before_chunk = lambda: left.append(cache.num_chunks(n) - len(left))  # noqa: B023, E731
        cache.backward(cache.loss(*cache.encode(*batch(n), before_chunk=before_chunk)))
        cache.replay(before_chunk)
        assert left == list(range(len(left), 0, -1)), f"step {step}"


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 5)

    def forward(self, tokens: dict, *, weight: list[Tensor]) -> Tensor:
        return self.lin(tokens["x"]) * tokens["mask"] * weight[0]


def test_inputs_may_be_nested_and_towers_may_share_an_encoder() -> None:
    """Dense retrieval: queries and passages (positives, then hard negatives) through one encoder, passages outnumbering
    queries.
    """
    torch.manual_seed(0)
    required = Nested().double()
    actual = copy.deepcopy(required)

    def inputs(n: int, seed: int) -> dict:
        g = torch.Generator().manual_seed(seed)
        x, mask, weight = (torch.randn(n, k, generator=g, dtype=torch.float64) for k in (7, 5, 1))
        return {"tokens": {"x": x, "mask": mask}, "weight": [weight]}

    def loss(q: Tensor, p: Tensor) -> Tensor:
        return F.cross_entropy(q @ p.T, torch.arange(len(q)))

    queries, passages = inputs(6, 1), inputs(15, 2)
    loss(required(**queries), required(**passages)).backward()
    for keep in (0, math.inf):
        actual.zero_grad()
        GradCache([actual, actual], loss, chunks=[4, 7], keep_bytes=keep).step(queries, passages)
        assert_same(gradients(actual), gradients(required), 1e-10)


def test_three_towers_with_inputs_of_three_kinds_and_chunks_of_their_own() -> None:
    """A module with positional inputs, a plain function, and a module whose output has a dimension more; unequal
    numbers of rows.
    """
    torch.manual_seed(0)
    required = nn.ModuleDict({"pair": nn.Bilinear(3, 4, 5), "tokens": nn.Linear(6, 5, bias=False)}).double()
    scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
    g = torch.Generator().manual_seed(1)
    a, b, c, d = (torch.randn(*size, generator=g, dtype=torch.float64) for size in ((9, 3), (9, 4), (9, 5), (20, 2, 6)))

    def gain(parts: list[Any]) -> Tensor:
        x, factor = parts
        return factor * x * scale

    def loss(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        scores = torch.einsum("nd,mtd->nmt", u * v, w).amax(2)
        return F.cross_entropy(scores, torch.arange(9))

    loss(required["pair"](a, b), gain([c, 2.0]), required["tokens"](d)).backward()
    expected = gradients(required) | {"scale": scale.grad}
    for keep in (0, math.inf):
        actual, scale.grad = copy.deepcopy(required), None
        actual.zero_grad()
        cache = GradCache([actual["pair"], gain, actual["tokens"]], loss, chunks=[4, 2, 100], keep_bytes=keep)
        cache.step((a, b), [c, 2.0], d)
        assert_same(gradients(actual) | {"scale": scale.grad}, expected, 1e-10)


@pytest.mark.parametrize("frozen", ["image", "text"])
def test_a_frozen_encoder_runs_once_and_gets_no_gradient(frozen: str) -> None:
    required, actual, calls = models(0.4), models(0.4), []
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
    plain, scaled = models(dtype=torch.float32), models(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    GradCache([plain["image"], plain["text"]], plain["head"], chunks=4).step(*batch(12, torch.float32))
    cache = GradCache([scaled["image"], scaled["text"]], scaled["head"], chunks=4, scaler=scaler)
    for _ in range(2):
        cache.step(*batch(12, torch.float32))
    assert_same(gradients(scaled), {k: 2048 * g for k, g in gradients(plain).items()}, 1e-6)


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


def test_autocast_does_not_lose_gradients_between_the_passes() -> None:
    """Autocast caches cast weights; a cache filled by the pass without a graph would cut the second pass off from its
    weights.
    """
    required, actual = models(dtype=torch.float32), models(dtype=torch.float32)
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


class Output(UserDict[str, Tensor]):
    """A mapping that is not a dict, such as transformers' BatchEncoding."""


@pytest.mark.parametrize("keep", [0, math.inf])
def test_inputs_may_be_any_mapping_and_outputs_anything_with_a_representation(keep: float) -> None:
    """Mappings within mappings; one tower returns a tensor, the other a tuple of a mapping."""
    required, actual = models(), models()
    images, texts = batch(11)
    required["head"](required["image"](images), 2 * required["text"](texts)).backward()

    def encoders(m: nn.ModuleDict) -> list[Callable[..., Any]]:
        return [lambda x: m["image"](x), lambda inner, names: (Output(out=m["text"](inner["x"])), len(names))]

    pick = [None, lambda output: 2 * output[0]["out"]]
    cache = GradCache(encoders(actual), actual["head"], chunks=[3, 4], keep_bytes=keep, representation=pick)
    cache.step(Output(x=images), Output(inner=Output(x=texts), names=["not", "sliced"]))
    assert_same(gradients(actual), gradients(required), 1e-10)


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the encoder is a small BERT of transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).double().eval()


def test_a_model_of_transformers_takes_a_batch_encoding_and_its_output_is_mapped(bert: nn.Module) -> None:
    """One encoder for queries and passages, and keywords of the loss."""
    from transformers import BatchEncoding

    def tokens(rows: int) -> Any:
        ids = torch.arange(rows * 6).reshape(rows, 6) % 50
        return BatchEncoding({"input_ids": ids, "attention_mask": (ids % 5 > 0).long()})

    def loss(q: Tensor, p: Tensor, *, scale: float, target: Tensor) -> Tensor:
        return F.cross_entropy(scale * q @ p.T, target)

    def first(output: Any) -> Tensor:
        return output.last_hidden_state[:, 0]

    queries, passages, options = tokens(5), tokens(10), {"scale": 0.5, "target": torch.tensor([0, 2, 4, 6, 8])}
    required, actual = copy.deepcopy(bert), copy.deepcopy(bert)
    value = loss(first(required(**queries)), first(required(**passages)), **options)
    value.backward()
    cache = GradCache([actual, actual], loss, chunks=[2, 3], representation=first)
    assert torch.allclose(cache.step(queries, passages, **options), value)
    found, wanted = (
        {name: gradient for name, gradient in gradients(m).items() if "key.bias" not in name}  # zero but for rounding
        for m in (actual, required)
    )
    assert_same(found, wanted, 1e-10)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        cache.step(queries, passages, **options, temperature=1.0)
    with pytest.raises(ValueError, match=r"returned a BaseModelOutput.*, not a tensor; representation="):
        GradCache([actual, actual], loss, chunks=3).step(queries, passages, **options)


def test_negatives_that_follow_their_positive_are_put_after_all_positives() -> None:
    """The page about moving from GradCache shows this order. The truth is the index of each query's positive there."""
    generator = torch.Generator().manual_seed(2)
    queries, passages = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (4, 12))
    ordered = passages.unflatten(0, (len(queries), -1)).transpose(0, 1).flatten(0, 1)
    required = F.cross_entropy(queries @ passages.T, torch.arange(0, 12, 3))
    assert torch.allclose(contrastive_loss(queries, ordered, 1.0, objective="softmax_image"), required)


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
    "holds no tensor": {"inputs": [{"input_ids": [[1, 2], [3]]}] * 2},
    "empty batch": {"n": 0},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message: str) -> None:
    given = {**models(), "loss": lambda u, v: (u @ v.T).sum(), "chunks": 4, "n": 8, "options": {}} | MISTAKES[message]
    with pytest.raises(ValueError, match=message):
        cache = GradCache([given["image"], given["text"]], given["loss"], chunks=given["chunks"], **given["options"])
        cache.step(*given.get("inputs", (x[: given["n"]] for x in batch(8))))


def test_a_keyword_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_size'"):
        GradCache([nn.Linear(2, 2)], torch.sum, chunks=1, chunk_size=1)  # type: ignore[call-arg]


def test_batch_norm_sees_the_batch_at_once_and_counts_it_once() -> None:
    m = models()
    norm = m["image"].net[1] = nn.BatchNorm1d(12).double()
    with pytest.raises(ValueError, match=r"net\.1 is batch normalisation"):
        GradCache([m["image"], m["text"]], m["head"], chunks=4).step(*batch(12))
    GradCache([m["image"], m["text"]], m["head"], chunks=12).step(*batch(12))
    assert norm.num_batches_tracked == 1
    norm.eval()
    GradCache([m["image"], m["text"]], m["head"], chunks=4).step(*batch(12))


class Wordy(Encoder):
    """What it returns holds more than its features."""

    def __init__(self, width: int, kind: type) -> None:
        super().__init__(width)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        rows = super().forward(x)
        return (rows, rows.square()) if self.kind is tuple else self.kind(out=rows, squares=rows.square())


def over_ranks(rank: int, ranks: int, parallel: str) -> list[dict[str, Tensor]]:
    """The gradients of encoders that return a tuple and a mapping, with no graph kept, and with all."""
    m = models()
    m["image"], m["text"] = Wordy(7, tuple).double(), Wordy(9, dict).double()
    m.load_state_dict(models().state_dict())
    for side in ("image", "text"):
        if parallel == "ddp":
            m[side] = DistributedDataParallel(m[side])
        else:
            fully_shard(m[side], mesh=init_device_mesh("cpu", (ranks,)))

    def loss(u: Tensor, v: Tensor, temperature: float) -> Tensor:
        return ranks * contrastive_loss(u, v, m["head"].log_scale.exp() / temperature)

    inputs, found = [x.chunk(ranks)[rank] for x in batch(12)], []
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
    """The oracle is compiled too: a compiler's random numbers need not be those of eager torch, but have to be the same
    twice.
    """
    torch._dynamo.reset()
    required, actual = models(0.4), models(0.4)
    compiled = [[torch.compile(m[name], backend=backend) for name in ("image", "text")] for m in (required, actual)]
    for seed in (5, 6):
        required.zero_grad()
        actual.zero_grad()
        torch.manual_seed(seed)
        one_graph(compiled[0], required["head"], batch(12), [4, 6])
        torch.manual_seed(seed)
        GradCache(compiled[1], actual["head"], chunks=[4, 6]).step(*batch(12))
        assert_same(gradients(actual), gradients(required), 1e-10)
