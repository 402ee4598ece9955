"""One step of whole towers, cut up in every way, against one graph over the whole batch in one process.

The cases are a pairwise cover: any two values of any two of the dimensions below meet in at least one case. The
ordinary suite has few of them, with each value on one rank and on two.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clipscale.config.model import TowerConfig
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.data.tokenizer import Padding
from clipscale.distributed.parallel import gradient_norm, sum_gradients, wrap
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.loss.choices import EXCHANGES
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel
from clipscale.step.cache.grad_cache import GradCache
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks
from tests.support.towers import PIXELS, TOKENS, small_model

BATCH = 12
# Chunks of images and texts: small; ragged, for 12, 6 and 3 images and 24, 12 and 6 texts; one chunk. 60 kB hold some
# graphs. `nodes` needs several nodes; tests/loss/test_exchange.py has it.
DIMENSIONS = {
    "ranks": (1, 2, 4),
    "parallel": ("none", "ddp", "zero2", "zero3"),
    "exchange": tuple(name for name in EXCHANGES if name != "nodes"),
    "chunks": ((1, 2), (2, 5), (12, 24)),
    "noise": ("none", "dropout", "patch dropout"),
    "offload": ("none", "host"),
    "keep": (1e9, 0.0, 60e3),
    "loss": ("softmax", "sigmoid", "hard negatives"),
    "checkpointing": ("none", "all"),
    "captions": ("as they come", "sorted"),
    "lean": (True, False),
    "dtype": ("float64", "float32"),
}
# The relative error of each gradient (in its norm), of the value, and of all gradients' norm, against float64. The
# float32 cases have 2e-6 at most: roundings of 6e-8 each, in operations that follow one another. A mistake is far
# larger: another picture in the place of one of the twelve changes every gradient by 4e-2 or more.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True)
class Case:
    ranks: int
    parallel: str
    chunks: tuple[int, int]
    noise: str
    offload: str
    keep: float
    loss: str
    checkpointing: str
    captions: str
    lean: bool
    trained: tuple[str, str] = ("all", "all")
    dtype: str = "float64"
    # The rank of adapters.
    lora: int = 0
    exchange: str = "auto"

    @property
    def negatives(self) -> int:
        """Hard negative texts of one rank."""
        return BATCH // self.ranks if self.loss == "hard negatives" else 0


@cache
def cases() -> list[Case]:
    """The cover. Greedy: always the possible case that covers most pairs of values that are not covered yet, the first
    of equals."""
    values = [(name, value) for name, several in DIMENSIONS.items() for value in several]
    every = np.indices([len(several) for several in DIMENSIONS.values()]).reshape(len(DIMENSIONS), -1)
    # A row for each case, with 1 in the columns of its values.
    has = np.hstack([np.eye(1 + i.max(), dtype=np.float32)[i] for i in every])
    has = has[is_possible({value: column > 0 for value, column in zip(values, has.T)})]
    left = np.triu(has.T @ has, 1) > 0
    chosen = []
    while left.any():
        best = has[((has @ left) * has).sum(1).argmax()]
        chosen.append(Case(**dict(value for value, its in zip(values, best) if its)))
        left &= np.outer(best, best) == 0
    return chosen


def is_possible(has: dict[tuple[str, object], np.ndarray]) -> np.ndarray:
    """One process is not parallel, and exchanges nothing; captions that are cut need the lean towers."""
    alone = has["ranks", 1]
    is_lean = has["lean", True] | has["captions", "as they come"]
    return (has["parallel", "none"] == alone) & (has["exchange", "auto"] == alone) & is_lean


def partly_frozen() -> list[Case]:
    """The cover's cases without noise again: whole captions in open_clip's own forward passes."""
    quiet = [case for case in cases() if case.noise == "none"]
    return [replace(case, trained=("2", "1"), lean=case.captions == "sorted") for case in quiet]


def model_of(case: Case) -> ClipModel:
    image, text = (TowerConfig(train=groups) for groups in case.trained)
    model = small_model(
        image=image,
        text=text,
        dropout=0.3 if case.noise == "dropout" else 0.0,
        patch_dropout=0.5 if case.noise == "patch dropout" else 0.0,
        grad_checkpointing=case.checkpointing == "all",
        lean=case.lean,
        init_bias=-2.0 if case.loss == "sigmoid" else None,
        lora=case.lora,
    )
    for name, p in model.named_parameters():
        if ".lora_B." in name:  # which begin at 0
            nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model.to(getattr(torch, case.dtype))


def inputs_of(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's pixels and tokens; its hard negatives follow its captions.

    The same samples for every number of ranks.
    """
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=g)
    tokens = torch.randint(1, 50, (2, BATCH, TOKENS), dtype=torch.int32, generator=g)
    tokens *= torch.arange(TOKENS) < torch.randint(1, TOKENS + 1, (2, BATCH, 1), generator=g)  # padded with 0
    own = slice(rank * BATCH // case.ranks, (rank + 1) * BATCH // case.ranks)
    return pixels[own], torch.cat([tokens[0, own], tokens[1, own][: case.negatives]])


def objective(case: Case) -> str:
    return {"softmax": "softmax", "sigmoid": "sigmoid", "hard negatives": "softmax_image"}[case.loss]


def one_graph(case: Case) -> tuple[dict[str, Tensor], float]:
    """The oracle in one graph: whole captions in the batch's order.

    Chunks matter only for the order in which random numbers are drawn. Each rank draws its own, first for images, then
    for captions as they are cut. `SortedTexts` says which captions a chunk has, and not what is in it.
    """
    model = model_of(case)
    images = []
    captions = []
    negatives = []
    for rank in range(case.ranks):
        pixels, tokens = inputs_of(case, rank)
        torch.manual_seed(7 + rank)
        images += [model.image(rows) for rows in pixels.split(case.chunks[0])]
        if (case.captions, case.noise) == ("sorted", "dropout"):
            inputs = sorted_texts(case, tokens)
            inputs.split(chunks_of_all_ranks(case))
            rows_of_chunks = [inputs.rows(*span) for span in inputs.spans(case.chunks[1])]
            order = torch.cat(rows_of_chunks)
            assert order.sort().values.equal(torch.arange(len(tokens))), case
            texts = torch.cat([model.text(trimmed(tokens[rows])) for rows in rows_of_chunks])[order.argsort()]
        else:
            texts = torch.cat([model.text(rows) for rows in tokens.split(case.chunks[1])])
        captions.append(texts[: len(pixels)])
        negatives.append(texts[len(pixels) :])
    scale = model.logit_scale.exp()
    bias = 0.0 if model.logit_bias is None else model.logit_bias
    features = torch.cat(images), torch.cat([*captions, *negatives])
    value = dense_contrastive_loss(*features, scale, logit_bias=bias, objective=objective(case))
    value.backward()
    actual = gradients(model)
    assert actual.keys() == {name for name, p in model.named_parameters() if p.requires_grad}, case
    return actual, value.item()


def trimmed(tokens: Tensor) -> Tensor:
    """Texts without the padding that they share, in a multiple of eight tokens."""
    length = int((tokens != 0).any(0).nonzero().max()) + 1
    return tokens[:, : min(-(-length // 8) * 8, TOKENS)]


# Gradients, value, gradients' norm, and the share of graphs that were kept.
StepOutcome = tuple[dict[str, Tensor], float, float, float]


def cached_step(case: Case, rank: int) -> StepOutcome:
    """The same step by the cache, on this rank."""
    model = model_of(case)
    world = World(rank, case.ranks, torch.device("cpu"))
    towers = [wrap(world, tower, case.parallel, torch.float32) for tower in (model.image, model.text)]

    def loss(u: Tensor, v: Tensor) -> Tensor:
        bias = model.logit_bias if case.loss == "sigmoid" else None
        scale = model.logit_scale.exp()
        return contrastive_loss(u, v, scale, logit_bias=bias, objective=objective(case), exchange=case.exchange)

    keep = case.keep * getattr(torch, case.dtype).itemsize / 8
    cache = GradCache(towers, loss, chunks=case.chunks, keep_bytes=keep)
    pixels, tokens = inputs_of(case, rank)
    texts = loader_of(tokens, case)
    if case.captions == "sorted":
        texts = sorted_texts(case, tokens)
        texts.make_chunks(case.chunks[1])
        texts.split(world.all_reduce_max(texts.num_chunks)[0])
        if world.size > 1:
            assert len(set(world.all_gather_object(len(texts.spans(case.chunks[1]))))) == 1, "FSDP2 needs equal counts"
    if case.keep:  # the first step measures graphs
        cache.step(loader_of(pixels, case), texts)
        model.zero_grad()
    torch.manual_seed(7 + rank)
    value = cache.step(loader_of(pixels, case), texts)
    kept = 2 * sum(cache.num_kept_graphs) / cache.num_chunk_passes(len(pixels))
    sum_gradients(world, [model.logit_scale, model.logit_bias])
    return gradients(model), value.item(), gradient_norm(model.parameters()).item(), kept


def sorted_texts(case: Case, tokens: Tensor) -> SortedTexts:
    captions = SortedTexts(
        lambda start, stop: tokens[start:stop],
        lambda: Padding(0).lengths(tokens.numpy()),
        len(tokens),
        TOKENS,
        torch.device("cpu"),
        stays_on_device=case.offload == "none",
    )
    captions.make_chunks(case.chunks[1])
    return captions


def chunks_of_all_ranks(case: Case) -> int:
    """The most chunks that any rank cuts its captions into."""
    every = [inputs_of(case, rank)[1] for rank in range(case.ranks)]
    return max(len(sorted_texts(case, tokens).spans(case.chunks[1])) for tokens in every)


def loader_of(tensor: Tensor, case: Case) -> ChunkLoader:
    resident = case.offload == "none"
    return ChunkLoader(
        lambda start, stop: tensor[start:stop], len(tensor), torch.device("cpu"), stays_on_device=resident
    )


def cached_steps(rank: int, ranks: int, cases: Iterable[dict]) -> list[StepOutcome]:
    return [cached_step(Case(**case), rank) for case in cases]


def values_in_effect(case: Case) -> set[tuple[object, ...]]:
    """Values together with what they need to act: an exchange moves columns both ways for a symmetric loss, and sorted
    captions and kept graphs differ from others where a tower has several chunks."""
    is_chunked = case.chunks != (12, 24)
    return {
        ("exchange", case.exchange, case.loss == "softmax"),
        ("captions", case.captions, is_chunked),
        ("parallel", case.parallel, is_chunked and case.keep > 0),
    }


def cases_of_each_value(chosen: list[Case]) -> list[Case]:
    """Few of these cases that have all values of all dimensions that any of them has, where the values act. Each adds
    the most that are still missing, the first of equals."""
    values_of = [{(name, getattr(case, name)) for name in DIMENSIONS} | values_in_effect(case) for case in chosen]
    missing = set[tuple[object, ...]]().union(*values_of)
    few = []
    while missing:
        best = max(range(len(chosen)), key=lambda i: len(values_of[i] & missing))
        few.append(chosen[best])
        missing -= values_of[best]
    return few


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_step_is_that_of_one_graph(ranks: int) -> None:
    """For each value of each dimension in at least one case."""
    compare(cases_of_each_value([case for case in cases() if case.ranks == ranks]), ranks)


@pytest.mark.slow  # the test above has each value of each dimension, but 4 ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_step_of_any_two_values_is_that_of_one_graph(ranks: int) -> None:
    compare([case for case in cases() if case.ranks == ranks], ranks)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_step_of_partly_frozen_towers_is_that_of_one_graph(ranks: int) -> None:
    compare([case for case in partly_frozen() if case.ranks == ranks], ranks)


@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3))])
def test_the_step_of_adapters_is_that_of_one_graph(ranks: int) -> None:
    """Adapters have rank 3. In some cases a tower also trains its projection whole, or a whole block."""
    pytest.importorskip("peft", reason="peft is not installed (clipscale[lora])")
    rest: list[tuple[Any, ...]] = [
        ("ddp", (1, 2), "none", "none", 60e3, "softmax", "none", "sorted", True, ("all", "1")),
        ("ddp", (2, 5), "dropout", "host", 0.0, "sigmoid", "all", "as they come", True, ("2", "all")),
        ("zero3", (12, 24), "patch dropout", "none", 1e9, "hard negatives", "all", "sorted", True, ("2", "1")),
        ("zero2", (2, 5), "none", "none", 0.0, "softmax", "none", "as they come", True, ("all", "none")),
    ]
    every = [Case(ranks, *values) for values in rest]
    chosen = [replace(case, lora=3, exchange=("gather", "ring")[i % 2]) for i, case in enumerate(every)]
    compare([replace(case, parallel="none") if ranks == 1 else case for case in chosen], ranks)


def compare(chosen: list[Case], ranks: int) -> None:
    if ranks == 1:
        outcomes = [[cached_step(case, 0) for case in chosen]]
    else:
        outcomes = run_ranks(cached_steps, ranks, [asdict(case) for case in chosen])
    for i, case in enumerate(chosen):
        tolerance = TOLERANCE[case.dtype]
        expected, value = one_graph(replace(case, dtype="float64"))
        norm = torch.nn.utils.get_total_norm(expected.values()).item()
        for actual, found_value, found_norm, kept in (outcome[i] for outcome in outcomes):
            assert case.keep == 60e3 or kept == bool(case.keep), case
            assert found_value == pytest.approx(value, rel=tolerance), case
            assert found_norm == pytest.approx(norm, rel=tolerance), case
            assert_same(actual, expected, tolerance, case)
