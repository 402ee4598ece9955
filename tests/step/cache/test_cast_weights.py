"""A step in chunks casts its weights once, and its gradients equal autograd's."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.loss.api import contrastive_loss
from clipscale.models.linear import CastLayer, CastLinear, replace_linear_layers
from clipscale.models.towers import ClipModel
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.cache.grad_cache import GradCache
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks
from tests.support.towers import blocks_of, samples, small_model

BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
N = 10


def cached(model: ClipModel, chunks: int, keep: float = 0, towers: list[nn.Module] | None = None) -> GradCache:
    def loss(u: Tensor, v: Tensor) -> Tensor:
        return contrastive_loss(u, v, model.logit_scale.exp())

    return GradCache(towers or [model.image, model.text], loss, chunks=chunks, keep_bytes=keep, autocast=BF16)


def plain(model: ClipModel, chunks: int = 4) -> dict[str, Tensor]:
    """Gradients by autograd alone."""
    model.zero_grad()
    with patch.object(CastWeights, "start_step", lambda *arguments: None):
        cached(model, chunks).step(*samples(N))
    return gradients(model)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """On a CPU a chunk's products are rounded as autograd's are. The gradients of biases are not."""
    for ends, most in ((True, 0.02), (False, tolerance)):
        one, other = ({k: v for k, v in x.items() if k.endswith("bias") is ends} for x in (actual, expected))
        assert_same(one, other, most)


def tied(**options: Any) -> ClipModel:
    model = small_model(**options)
    first = model.image.encoder.transformer.resblocks[0].mlp
    second = model.text.encoder.transformer.resblocks[0].mlp
    second.c_fc.weight = first.c_fc.weight
    return model


def hooked(**options: Any) -> ClipModel:
    """A weight whose gradient a hook doubles, and one whose sum of gradients a hook multiplies."""

    def multiply(p: Tensor) -> None:
        assert p.grad is not None
        p.grad *= 3

    model = small_model(**options)
    blocks = model.image.encoder.transformer.resblocks
    blocks[0].mlp.c_fc.weight.register_hook(lambda gradient: 2 * gradient)
    blocks[1].mlp.c_fc.weight.register_post_accumulate_grad_hook(multiply)
    return model


def half_frozen(**options: Any) -> ClipModel:
    model = small_model(**options)
    model.image.encoder.transformer.resblocks[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[..., ClipModel]] = {
    "plain": small_model,
    "not lean": partial(small_model, lean=False),
    "adapters": partial(small_model, lora=3),
    "checkpointing": partial(small_model, grad_checkpointing=True),
    "half frozen": half_frozen,
    "tied": tied,
}


SOME = 200_000
# Some graphs are kept, others are not; of all and none the plain model alone is ordinary.
KEPT = [SOME, *(pytest.param(keep, marks=pytest.mark.slow) for keep in (0, math.inf))]


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        *(("plain", keep) for keep in (0, SOME, math.inf)),
        *((name, SOME) for name in MODELS if name != "plain"),
        *(
            pytest.param(name, keep, marks=pytest.mark.slow)
            for name in MODELS
            if name != "plain"
            for keep in (0, math.inf)
        ),
    ],
)
def test_gradients_are_those_of_autograd(name: str, keep: float) -> None:
    if name == "adapters":
        pytest.importorskip("peft", reason="peft is not installed (clipscale[lora])")
    model = MODELS[name]()
    expected = plain(model)
    cache = cached(model, 4, keep)
    for _ in range(2):  # the first measures a graph
        model.zero_grad()
        cache.step(*samples(N))
        assert_close(gradients(model), expected)
    cache.step(*samples(N))  # adds to them
    assert_close(gradients(model), {key: 2 * value for key, value in expected.items()})


def test_a_hook_sees_every_gradient_of_its_weight() -> None:
    """The first hook doubles a gradient; the second multiplies the sum so far, chunk by chunk."""
    expected = plain(small_model())
    model = hooked()
    seen = []
    blocks = model.image.encoder.transformer.resblocks
    blocks[0].mlp.c_fc.weight.register_hook(lambda gradient: seen.append(len(seen)))
    of_chunks: list[Tensor] = []
    blocks[1].mlp.c_fc.weight.register_hook(lambda gradient: of_chunks.append(gradient.clone()))
    cached(model, 4).step(*samples(N))
    actual = gradients(model)
    changed = [f"image.encoder.transformer.resblocks.{i}.mlp.c_fc.weight" for i in (0, 1)]
    assert_same({changed[0]: actual.pop(changed[0])}, {changed[0]: 2 * expected.pop(changed[0])}, 1e-6)
    first, second, third = of_chunks
    assert_same({changed[1]: first + second + third}, {changed[1]: expected.pop(changed[1])}, 1e-6)
    assert_same({changed[1]: actual.pop(changed[1])}, {changed[1]: 27 * first + 9 * second + 3 * third}, 1e-6)
    assert_close(actual, expected)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("keep", [0, math.inf])
def test_gradients_may_be_cleared_between_the_passes(keep: float) -> None:
    model = small_model()
    expected = plain(model)
    cache = cached(model, 4, keep)
    features = cache.encode(*samples(N))
    cache.backward(cache.loss(*features))
    model.image.zero_grad()
    model.text.zero_grad(set_to_none=True)
    for p in model.image.parameters():
        p.grad = torch.zeros_like(p)
    cache.replay()
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("keep", [0, math.inf])
def test_a_layer_of_inputs_without_gradients_learns(keep: float) -> None:
    """The first layer of an encoder is such a layer, since its inputs are data. Here it has no bias."""
    model = small_model()
    encoder = nn.Sequential(type(model.image.encoder.transformer.resblocks[0].mlp.c_fc)(nn.Linear(6, 4, bias=False)))
    x = torch.randn(N, 6)
    cache = GradCache([encoder], lambda u: u.float().square().sum(), chunks=4, keep_bytes=keep, autocast=BF16)
    with patch.object(CastWeights, "start_step", lambda *arguments: None):
        cache.step(x)
    expected = gradients(encoder)
    encoder.zero_grad()
    cache.step(x)
    assert_close(gradients(encoder), expected)


class SomeLayers(nn.Module):
    """It calls one layer for every chunk, one for chunks that begin with a positive number, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (CastLinear(nn.Linear(6, 6)) for _ in range(3))
        nn.init.zeros_(self.always.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(y) if x[0, 0] > 0 else y


def begins_with(first: list[float], rank: int = 0) -> Tensor:
    """Two samples for each number, the first of which begins with it. The other numbers differ between the ranks."""
    x = torch.randn(2 * len(first), 6, generator=torch.Generator().manual_seed(rank))
    x[::2, 0] = torch.tensor(first)
    return x


def gradients_in_chunks(
    first: list[float], chunks: int, keep: float, *, rank: int = 0, by_autograd: bool = False
) -> dict[str, Tensor]:
    """The gradients of `SomeLayers` after two steps. `first`: see `begins_with`."""
    torch.manual_seed(0)
    encoder = SomeLayers()
    x = begins_with(first, rank)
    cache = GradCache([encoder], lambda u: u.float().square().sum(), chunks=chunks, keep_bytes=keep, autocast=BF16)
    for _ in range(2):  # the first measures a graph
        encoder.zero_grad()
        if by_autograd:
            with patch.object(CastWeights, "start_step", lambda *arguments: None):
                cache.step(x)
        else:
            cache.step(x)
    return gradients(encoder)


@pytest.mark.parametrize("keep", [0, 300, math.inf])
@pytest.mark.parametrize("first", [[-1.0] * 4, [1.0, -1, -1, -1], [-1.0, -1, 1, -1], [1.0] * 4])
def test_a_layer_that_no_chunk_calls_has_no_gradient(first: list[float], keep: float) -> None:
    """With zeros in its place an optimizer would decay the weight, and with one chunk it would not."""
    actual = gradients_in_chunks(first, 2, keep)
    assert_close(actual, gradients_in_chunks(first, 2, keep, by_autograd=True))
    assert ("sometimes.weight" in actual) is (max(first) > 0)
    if len({*first}) == 1:
        assert actual.keys() == gradients_in_chunks(first, 8, keep).keys(), "one chunk"


def test_a_gradient_of_zeros_is_one() -> None:
    """The layer is called, and the zeros after it stop its gradient: autograd has zeros, too."""
    encoder = nn.Sequential(CastLinear(nn.Linear(6, 4)), CastLinear(nn.Linear(4, 3)))
    nn.init.zeros_(encoder[1].weight)
    cache = GradCache([encoder], lambda u: u.float().square().sum(), chunks=2, autocast=BF16)
    cache.step(torch.randn(6, 6))
    assert encoder[0].weight.grad is not None and not encoder[0].weight.grad.any()


def test_a_layer_that_only_one_of_two_towers_calls_has_its_gradient() -> None:
    """The towers share an encoder, so its accumulated gradients are theirs both."""
    found = []
    for start_step in (CastWeights.start_step, lambda *arguments: None):
        torch.manual_seed(0)
        encoder = SomeLayers()
        x = torch.randn(8, 6)
        x[:, 0] = -1
        loss = lambda u, v: (u.float() @ v.float().T).square().sum()  # noqa: E731
        cache = GradCache([encoder] * 2, loss, chunks=2, keep_bytes=math.inf, autocast=BF16)
        with patch.object(CastWeights, "start_step", start_step):
            cache.step(x, x.abs())
        found.append(gradients(encoder))
    assert_close(*found)
    assert "sometimes.weight" in found[0] and "never.weight" not in found[0]


def test_an_error_of_the_device_is_not_hidden_by_a_second_one() -> None:
    """After it the device may compute nothing more, so a step that fails reads no gradients."""

    class Fails(SomeLayers):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 0:
                raise ZeroDivisionError
            return super().forward(x)

    cache = GradCache([Fails()], torch.sum, chunks=2, keep_bytes=math.inf, autocast=BF16)
    with patch.object(Tensor, "any", side_effect=RuntimeError("CUDA error")), pytest.raises(ZeroDivisionError):
        cache.step(begins_with([-1.0, 1.0]))


def test_a_pass_that_fails_leaves_the_tensor_to_which_its_graph_would_have_added() -> None:
    """A later pass of the step adds to the same one, even if `.grad` has been cleared in between."""
    layer = CastLinear(nn.Linear(6, 4))
    weights = CastWeights()
    weights.start_step(layer, BF16, num_chunks=2)
    with pytest.raises(RuntimeError), weights.in_pass(builds_graph=True, is_last_backward=False):
        first = layer.weight.grad
        raise RuntimeError
    layer.zero_grad()
    with weights.in_pass(builds_graph=True, is_last_backward=False):
        assert first is not None and layer.weight.grad is first


class Casts(TorchDispatchMode):
    """Numbers of elements cast from float32 to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, out.dtype) == (torch.float32, torch.bfloat16):
            self.elements.append(out.numel())
        return out


def test_a_weight_is_cast_once_however_many_chunks() -> None:
    """It counts a layer's weights by their size, which no activation has."""
    model = small_model()
    weights = model.image.encoder.transformer.resblocks[0].mlp.c_fc.weight.numel()
    layers = 2 * len(blocks_of(model))
    for chunks in (4, 1):
        with Casts() as casts:
            cached(model, chunks).step(*samples(N))
        assert casts.elements.count(weights) == layers
    half_weights = [module.half_weights for module in model.modules() if isinstance(module, CastLayer)]
    assert half_weights and all(weights is None for weights in half_weights), "an evaluation uses the new weights"


def test_autocast_is_asked_for_its_type_once_however_many_layers() -> None:
    contexts = []

    def autocast() -> torch.autocast:
        contexts.append(BF16())
        return contexts[-1]

    encoder = nn.Sequential(*(CastLinear(nn.Linear(6, 6)) for _ in range(4)))
    GradCache([encoder], lambda u: u.float().square().sum(), chunks=2, autocast=autocast).step(torch.randn(6, 6))
    passes = 2 * 3
    assert len(contexts) == passes + 1


def test_a_packed_projection_with_adapters_is_cast_once() -> None:
    pytest.importorskip("peft", reason="peft is not installed (clipscale[lora])")
    model = small_model(lora=3)
    projections = [
        block.attn.in_proj for tower in (model.image, model.text) for block in tower.encoder.transformer.resblocks
    ]
    with Casts() as casts:
        cached(model, 4).step(*samples(N))
    assert casts.elements.count(projections[0].weight.numel()) == len(projections)


@pytest.mark.slow  # step/test_compiled.py compiles, too
def test_compiled_blocks_have_the_same_gradients() -> None:
    """In a process of its own: compiling changes torch for good."""
    run_ranks(compiled, 1)


def compiled(rank: int, world_size: int) -> None:
    encoder = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    replace_linear_layers(encoder)
    x = torch.randn(N, 6)
    found = []
    for keep, start_step in (
        (0, lambda *arguments: None),
        (0, CastWeights.start_step),
        (math.inf, CastWeights.start_step),
    ):
        encoder.zero_grad()
        cache = GradCache([encoder], lambda u: u.float().square().sum(), chunks=5, keep_bytes=keep, autocast=BF16)
        with patch.object(CastWeights, "start_step", start_step):
            cache.step(x)
        found.append({name: gradient.clone() for name, gradient in gradients(encoder).items()})
        encoder.compile(dynamic=False, backend="aot_eager")
    for actual in found[1:]:
        assert_close(actual, found[0], 0.02)


@pytest.mark.parametrize("keep", KEPT)
def test_ddp_sums_all_chunks_with_the_last(keep: float) -> None:
    for actual, expected in run_ranks(half_of_the_batch, 2, keep):
        assert_close(actual, expected)


def half_of_the_batch(rank: int, world_size: int, keep: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the gradients with weights that are cast once, and by autograd alone."""
    model = small_model()
    towers: list[nn.Module] = [
        DistributedDataParallel(tower, gradient_as_bucket_view=True) for tower in (model.image, model.text)
    ]
    cache = cached(model, 2, keep, towers)
    rows = [x[rank * N // world_size :][: N // world_size] for x in samples(N)]
    found = []
    for start_step in (CastWeights.start_step, lambda *arguments: None):
        with patch.object(CastWeights, "start_step", start_step):
            for _ in range(2):  # the first measures a graph
                model.zero_grad()
                cache.step(*rows)
        found.append({name: gradient.clone() for name, gradient in gradients(model).items()})
    return found[0], found[1]


# Where each rank's chunks begin with a positive number, they call a layer: on rank 0 only one that is not the last.
FIRST_OF_RANKS = [[1.0, -1, -1], [-1.0, -1, -1]]


def under_ddp_that_finds_unused(rank: int, world_size: int, keep: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    encoder = SomeLayers()
    wrapped = DistributedDataParallel(encoder, find_unused_parameters=True)
    cache = GradCache([wrapped], lambda u: u.float().square().sum(), chunks=2, keep_bytes=keep, autocast=BF16)
    for _ in range(2):
        encoder.zero_grad()
        cache.step(begins_with(FIRST_OF_RANKS[rank], rank))
    return gradients(encoder)


@pytest.mark.parametrize("keep", KEPT)
def test_ddp_finds_the_layers_that_no_chunk_of_any_rank_calls(keep: float) -> None:
    """It finds them by its hooks, so every chunk's gradients must reach these. The mean of the ranks is expected."""
    of_ranks = [gradients_in_chunks(first, 2, 0, rank=i, by_autograd=True) for i, first in enumerate(FIRST_OF_RANKS)]
    expected = {name: sum(g[name] for g in of_ranks if name in g) / len(of_ranks) for name in of_ranks[0]}
    for actual in run_ranks(under_ddp_that_finds_unused, 2, keep):
        assert_close(actual, expected)
