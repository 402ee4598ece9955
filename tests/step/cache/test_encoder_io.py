"""An encoder of the gradient cache takes any nesting of tensors, and its output may hold more than representations."""

import copy
import math
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipscale.loss.api import contrastive_loss
from clipscale.step.cache.grad_cache import GradCache
from tests.step.cache.encoders import batch, models
from tests.support.gradients import assert_same, gradients


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 5)

    def forward(self, tokens: dict, *, weight: list[Tensor]) -> Tensor:
        return self.lin(tokens["x"]) * tokens["mask"] * weight[0]


def test_inputs_may_be_nested_and_towers_may_share_an_encoder() -> None:
    """In dense retrieval one encoder gets queries, and more passages: positives, then hard negatives."""
    torch.manual_seed(0)
    required = Nested().double()
    actual = copy.deepcopy(required)

    def inputs(n: int, seed: int) -> dict:
        g = torch.Generator().manual_seed(seed)
        x, mask, weight = (torch.randn(n, k, generator=g, dtype=torch.float64) for k in (7, 5, 1))
        return {"tokens": {"x": x, "mask": mask}, "weight": [weight]}

    def loss(q: Tensor, p: Tensor) -> Tensor:
        return F.cross_entropy(q @ p.T, torch.arange(len(q)))

    queries = inputs(6, 1)
    passages = inputs(15, 2)
    loss(required(**queries), required(**passages)).backward()
    for keep in (0, math.inf):
        actual.zero_grad()
        GradCache([actual, actual], loss, chunks=[4, 7], keep_bytes=keep).step(queries, passages)
        assert_same(gradients(actual), gradients(required), 1e-10)


def test_three_towers_with_inputs_of_three_kinds_and_chunks_of_their_own() -> None:
    """They are a module with positional inputs, a plain function, and a module whose output has one more dimension.

    The last one has another number of rows.
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
        actual = copy.deepcopy(required)
        scale.grad = None
        actual.zero_grad()
        cache = GradCache([actual["pair"], gain, actual["tokens"]], loss, chunks=[4, 2, 100], keep_bytes=keep)
        cache.step((a, b), [c, 2.0], d)
        assert_same(gradients(actual) | {"scale": scale.grad}, expected, 1e-10)


class Output(UserDict[str, Any]):
    """A mapping that is not a dict, such as transformers' BatchEncoding."""


@pytest.mark.parametrize("keep", [0, math.inf])
def test_inputs_may_be_any_mapping_and_outputs_anything_with_a_representation(keep: float) -> None:
    """Mappings lie within mappings. One tower returns a tensor, the other a tuple with a mapping."""
    required = models()
    actual = models()
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
    """One encoder serves queries and passages, and the loss takes keywords."""
    from transformers import BatchEncoding

    def tokens(rows: int) -> Any:
        ids = torch.arange(rows * 6).reshape(rows, 6) % 50
        return BatchEncoding({"input_ids": ids, "attention_mask": (ids % 5 > 0).long()})

    def loss(q: Tensor, p: Tensor, *, scale: float, target: Tensor) -> Tensor:
        return F.cross_entropy(scale * q @ p.T, target)

    def first(output: Any) -> Tensor:
        return output.last_hidden_state[:, 0]

    queries = tokens(5)
    passages = tokens(10)
    options = {"scale": 0.5, "target": torch.tensor([0, 2, 4, 6, 8])}
    required = copy.deepcopy(bert)
    actual = copy.deepcopy(bert)
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
