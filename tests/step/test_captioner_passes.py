"""A captioner's step is open_clip's CoCa and CoCaLoss in one graph over the whole batch, whatever it is cut into."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from open_clip.coca_model import CoCa
from open_clip.loss import CoCaLoss, SigLipLoss
from torch import Tensor, nn

from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import DataError
from clipscale.common.modules import is_frozen
from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.sections import (
    CacheConfig,
    CaptionConfig,
    DistillConfig,
    LaunchConfig,
    LossConfig,
    OptimConfig,
)
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.shards.features import TeacherFeatures
from clipscale.distributed.world import World
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel
from clipscale.start.build_step import build_step
from clipscale.step.cache import kept_graphs
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.cache.kept_graphs import GraphBudget
from clipscale.step.captioner_passes import CaptionerPasses
from clipscale.step.precision import Precision
from clipscale.step.tower_inputs import TowerInputs
from clipscale.step.train_step import TrainStep
from tests.loss.dense_distillation import dense_distillation_loss
from tests.step.steps import host_batch, run_step
from tests.support.checkpoints import ONE_RANK
from tests.support.gradients import assert_same, gradients
from tests.support.ranks import run_ranks
from tests.support.towers import PIXELS, TOKENS, captioned, captioner_architecture, small_captioner

BATCH = 12
CPU = torch.device("cpu")
TEACHER = TeacherFeatures("teacher.npy", 7, "float32", 20.0)
# The samples' keys. Equal ones are on different ranks.
KEYS = np.arange(BATCH) % 7


def taught_features() -> Tensor:
    """The teacher's features of all pictures and captions: (BATCH, 2, 7)."""
    return F.normalize(torch.randn(BATCH, *TEACHER.shape, generator=torch.Generator().manual_seed(2)), dim=-1)


@dataclass(frozen=True)
class Case:
    parallel: str = "ddp"
    objective: str = "softmax"
    exchange: str = "gather"
    # Divides no rank's batch.
    chunk: int = 5
    keep: str = "none"
    is_sorted: bool = True
    # Whether the caption's own token has the mask of open_clip's weights.
    is_legacy: bool = False
    offload: str = "host"
    weight: float = 2.0
    # Whether the image tower is frozen.
    is_frozen: bool = False
    # The weights of the pairs' loss and of the distillation from TEACHER; None: there is none.
    distilled: tuple[float, float] | None = None
    sizes: tuple[int, ...] = ()
    # Whether samples with equal keys are no negatives of each other.
    uses_sameness_keys: bool = False
    # In bf16 the model is one of float32, otherwise of float64.
    precision: str = "fp32"

    @property
    def teachers(self) -> tuple[TeacherFeatures, ...]:
        return () if self.distilled is None else (TEACHER,)


def model_of(case: Case) -> ClipModel:
    bias = -2.0 if case.objective == "sigmoid" else None
    image = TowerConfig(train="none" if case.is_frozen else "all")
    model = small_captioner(init_bias=bias, image=image)
    if case.precision == "fp32":
        model.double()
    model.text.encoder.correct_cls_mask = not case.is_legacy
    return model


def step_of(case: Case, world: World) -> TrainStep:
    config = TrainConfig(
        batch=BATCH,
        model=ModelConfig(name="small", architecture=captioner_architecture(PIXELS, 3, TOKENS)),
        caption=CaptionConfig(weight=case.weight),
        data=DataConfig(train=["none"], same="url" if case.uses_sameness_keys else None),
        loss=LossConfig(objective=case.objective, exchange=case.exchange, sizes=[*case.sizes]),
        cache=CacheConfig(chunk=[str(case.chunk)], keep=case.keep),
        launch=LaunchConfig(parallel=case.parallel),
        optim=OptimConfig(lr=0.0),
        distill=DistillConfig(weights=case.distilled or (0.0, 1.0)),
        precision=case.precision,
        offload=case.offload,
    )
    model = model_of(case)
    precision = Precision.set_up(case.precision, CPU)
    if case.precision != "fp32":
        precision.cast_frozen_(model.image, model.text)
    sizes = ChunkSizes(case.chunk, case.chunk, "cpu")
    return build_step(config, world, model, precision, sizes, case.teachers, sorts_captions=case.is_sorted)


def share_of(rank: int, ranks: int, teachers: tuple[TeacherFeatures, ...] = ()) -> HostBatch:
    """This rank's share of the batch."""
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    pixels, tokens, taught = (x[share] for x in (*captioned(BATCH), taught_features()))
    return host_batch(pixels, tokens, KEYS[share], dict.fromkeys(teachers, taught))


class StepOutcome(NamedTuple):
    """The loss and its parts, the gradients, how many graphs were kept, and images in the image tower's passes."""

    losses: dict[str, float]
    gradients: dict[str, Tensor]
    kept: int
    encoded: int


def second_steps(rank: int, ranks: int, cases: list[Case]) -> list[StepOutcome]:
    """Runs two steps of each case and returns the second, in which the ranks know each other's numbers."""
    outcomes = []
    for case in cases:
        step = step_of(case, World(rank, ranks, CPU))
        batch = share_of(rank, ranks, case.teachers)
        run_step(step, batch, upcoming=batch)
        encoded: list[int] = []
        step.model.image.register_forward_pre_hook(lambda _, pixels, encoded=encoded: encoded.append(len(pixels[0])))
        result = run_step(step, batch, upcoming=batch)
        losses = {"loss": result.scalars.loss, **result.scalars.captioner_losses}
        [kept] = step.cache.num_kept_graphs
        outcomes.append(StepOutcome(losses, gradients(step.model), kept, sum(encoded)))
    return outcomes


def captioner_passes(chunk_loss: Tensor | None, labels: int = 4, weight: float = 3.0) -> CaptionerPasses:
    """Passes after a replay of captions with so many labels."""
    cache = GradCache([nn.Identity()], torch.sum, chunks=1)
    cache.chunk_loss = chunk_loss
    inputs = TowerInputs(ONE_RANK, stays_on_device=False, sorts_captions=False)
    return CaptionerPasses(cache, inputs, weight, frozen_images=None, autocast=nullcontext, num_labels=labels)


def test_the_caption_loss_is_the_mean_over_all_labels() -> None:
    passes = captioner_passes(torch.tensor(10.0), labels=4, weight=3.0)
    loss = passes.step_loss(torch.tensor(2.0))
    values = [float(value) for value in loss.tensors]
    assert values == [2.0, 2.5]
    assert loss.total_and_terms(*values) == (2.0 + 3 * 2.5, {"contrastive_loss": 2.0, "caption_loss": 2.5})


def test_the_sum_over_ranks_leaves_the_caches_own_loss_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GradCache.chunk_loss` is this rank's, however often the loss is asked for."""
    monkeypatch.setattr(World, "all_reduce_sum_", lambda world, tensor: tensor.mul_(2))
    passes = captioner_passes(torch.tensor(10.0), labels=4)
    assert [float(passes.step_loss(torch.tensor(2.0)).tensors[1]) for _ in range(2)] == [5.0, 5.0]
    assert passes.cache.chunk_loss == 10


def test_a_captioner_of_which_nothing_trains_has_no_caption_loss() -> None:
    value = torch.tensor(2.0)
    passes = captioner_passes(None)
    loss = passes.step_loss(value)
    assert loss.tensors == [value]
    assert loss.total_and_terms(2.0) == (2.0, {})


def test_the_features_of_pairs_are_images_and_captions_side_by_side() -> None:
    features_N2D = torch.randn(5, 2, 3)
    images, texts = captioner_passes(None).paired_features([features_N2D])
    assert torch.equal(images, features_N2D[:, 0]) and torch.equal(texts, features_N2D[:, 1])


def open_clip_model(model: ClipModel) -> CoCa:
    """open_clip's own module with the model's weights."""
    bias = None if model.logit_bias is None else 0.0
    theirs = CoCa(**captioner_architecture(PIXELS, 3, TOKENS), init_logit_bias=bias).double()
    theirs.visual.load_state_dict(model.image.encoder.state_dict())
    theirs.text.load_state_dict(model.text.encoder.state_dict())
    theirs.text_decoder.load_state_dict(model.decoder.state_dict())
    theirs.logit_scale.data.copy_(model.logit_scale)
    if model.logit_bias is not None:
        theirs.logit_bias.data.copy_(model.logit_bias)
    theirs.visual.requires_grad_(not is_frozen(model.image))
    theirs.text.correct_cls_mask = model.text.encoder.correct_cls_mask
    return theirs


def one_graph(case: Case) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The contrast and the caption loss without its weight, and their gradients by our names."""
    model = model_of(case)
    theirs = open_clip_model(model)
    pixels, tokens = captioned(BATCH)
    out = theirs(model.image.encoder_inputs(pixels), tokens)
    bias = out.pop("logit_bias", None)
    parts = CoCaLoss(caption_loss_weight=case.weight, clip_loss_weight=1.0)(**out, output_dict=True)
    if bias is not None:
        features = out["image_features"], out["text_features"]
        parts["contrastive_loss"] = SigLipLoss()(*features, out["logit_scale"], bias)
    if case.sizes or case.uses_sameness_keys:
        features = out["image_features"], out["text_features"]
        shortened = [[F.normalize(rows[:, :size], dim=-1) for rows in features] for size in case.sizes]
        given: dict[str, Any] = {"logit_bias": bias, "objective": case.objective}
        if case.uses_sameness_keys:
            given["keys"] = torch.from_numpy(KEYS)
        contrasts = [dense_contrastive_loss(u, v, out["logit_scale"], **given) for u, v in (features, *shortened)]
        parts["contrastive_loss"] = torch.stack(contrasts).sum()
    if case.distilled:
        of_pairs, of_teacher = case.distilled
        features = out["image_features"], out["text_features"]
        u, v = taught_features().double().unbind(1)
        taught = dense_distillation_loss(*features, out["logit_scale"], [(u, v, TEACHER.scale)])
        parts["contrastive_loss"] = of_pairs * parts["contrastive_loss"] + of_teacher * taught
    sum(parts.values()).backward()
    names = {"visual": "image.encoder", "text": "text.encoder", "text_decoder": "decoder"}
    found = {}
    for name, gradient in gradients(theirs).items():
        tower, _, rest = name.partition(".")
        found[f"{names[tower]}.{rest}" if rest else name] = gradient
    values = {name: value.item() for name, value in parts.items()}
    return values | {"caption_loss": values["caption_loss"] / case.weight}, found


ONE = [
    Case(),
    Case(objective="sigmoid", is_sorted=False, is_legacy=True, keep="5M", weight=0.3),
    Case(distilled=(0.0, 1.0)),
    Case(sizes=(3,), uses_sameness_keys=True),
]
TWO = [
    Case(exchange="ring", keep="5M"),
    Case("zero3", objective="sigmoid", is_sorted=False, is_legacy=True, chunk=4),
]
# Ordinary on one rank: in ONE, and frozen towers in the second test below.
MORE_ON_TWO = [
    Case(keep="5M", is_frozen=True),
    Case(distilled=(0.3, 0.7)),
    Case(objective="sigmoid", exchange="ring", sizes=(8, 3), uses_sameness_keys=True),
]
MORE = [
    Case(objective="sigmoid", exchange="ring", chunk=BATCH),
    Case(keep="1G", is_legacy=True, offload="none", chunk=3),
    Case(is_sorted=False, chunk=1),
]
SHARDED = [
    Case("zero2", objective="sigmoid", exchange="ring", keep="5M"),
    Case("zero2", is_sorted=False, is_legacy=True, chunk=3, keep="1G"),
    Case("zero3", keep="5M", offload="none"),
    Case("zero3", is_legacy=True, chunk=2, weight=0.3),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, ONE),
        (2, TWO),
        *(pytest.param(n, cases, marks=pytest.mark.slow) for n, cases in ((1, MORE), (2, MORE + SHARDED), (3, MORE))),
        pytest.param(2, MORE_ON_TWO, marks=pytest.mark.slow),
        pytest.param(3, SHARDED + TWO + MORE_ON_TWO, marks=pytest.mark.slow),
    ],
)
def test_the_step_is_that_of_open_clips_model_and_loss_in_one_graph(ranks: int, cases: list[Case]) -> None:
    outcomes = [second_steps(0, 1, cases)] if ranks == 1 else run_ranks(second_steps, ranks, cases)
    for i, case in enumerate(cases):
        values, expected = one_graph(case)
        values["loss"] = values["contrastive_loss"] + case.weight * values["caption_loss"]
        for losses, found, kept, _ in (outcome[i] for outcome in outcomes):
            assert losses == pytest.approx(values, rel=1e-10), case
            assert bool(kept) == (case.keep != "none"), case
            assert_same(found, expected, 1e-10, case)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("keep", ["none", "5M"])
def test_a_step_in_bf16_casts_weights_once_and_has_the_gradients_of_autograd(keep: str, is_frozen: bool) -> None:
    """On a CPU the products of a chunk are rounded as autograd's are. Those of biases are not rounded."""
    case = Case(keep=keep, is_frozen=is_frozen, precision="bf16")
    [actual] = second_steps(0, 1, [case])
    with patch.object(CastWeights, "start_step", lambda *arguments: None):
        [expected] = second_steps(0, 1, [case])
    assert bool(actual.kept) == bool(expected.kept) == (keep != "none")
    assert actual.losses == pytest.approx(expected.losses, rel=1e-6)
    for ends, most in ((True, 0.02), (False, 1e-6)):
        found, wanted = (
            {k: v for k, v in outcome.gradients.items() if k.endswith("bias") is ends} for outcome in (actual, expected)
        )
        assert_same(found, wanted, most)
    exact = one_graph(replace(case, precision="fp32"))[1]
    assert_same({name: gradient.double() for name, gradient in actual.gradients.items()}, exact, 0.1)


# Memory in which no image's tokens are kept, those of a chunk of 5, those of all images, and graphs, too; and how many
# images of a rank's 12 or 6 are encoded again.
KEPT = {"none": (12, 6), "8k": (7, 1), "30k": (0, 0), "5M": (0, 0)}


@pytest.mark.parametrize(
    ("ranks", "parallel", "keeps"),
    [
        (1, "ddp", ["8k", "30k"]),
        *(pytest.param(*how, [*KEPT], marks=pytest.mark.slow) for how in ((1, "ddp"), (2, "ddp"), (2, "zero3"))),
    ],
)
def test_a_frozen_image_tower_has_one_pass_where_its_tokens_are_kept(
    ranks: int, parallel: str, keeps: list[str]
) -> None:
    cases = [Case(parallel, keep=keep, is_frozen=True, is_sorted=keep != "30k") for keep in keeps]
    outcomes = [second_steps(0, 1, cases)] if ranks == 1 else run_ranks(second_steps, ranks, cases)
    expected = one_graph(cases[0])[1]
    for i, case in enumerate(cases):
        for _, found, kept, encoded in (outcome[i] for outcome in outcomes):
            assert encoded == BATCH // ranks + KEPT[case.keep][ranks - 1], case
            assert bool(kept) == (case.keep == "5M"), case
            assert_same(found, expected, 1e-10, case)


def kept_on_gpus(rank: int, ranks: int, full: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients of a step, and the graphs that it kept. `full`: the second rank's GPU has room for one graph alone."""
    plan = GraphBudget.plan
    calls = count()
    on_gpu = lambda self, *args, **given: plan(self, *args, **{**given, "on_gpu": True})  # noqa: E731
    GraphBudget.plan = on_gpu
    kept_graphs.free_gpu_memory = lambda: -1 if full and rank and next(calls) == 1 else 1
    step = step_of(Case("zero3", chunk=2), World(rank, ranks, CPU))
    step.cache.keep_bytes = math.inf
    run_step(step, share_of(rank, ranks))
    [kept] = step.cache.num_kept_graphs
    return gradients(step.model), kept


@pytest.mark.slow  # two starts of two ranks
def test_a_rank_without_room_for_a_graph_gathers_what_the_others_gather() -> None:
    """The other ranks gather the decoder's weights, which a pass without a graph does not need."""
    for (plain, kept), (dropped, none) in zip(
        run_ranks(kept_on_gpus, 2, False), run_ranks(kept_on_gpus, 2, True), strict=True
    ):
        assert kept > 1 and none == 0
        assert all(torch.equal(plain[name], dropped[name]) for name in plain)


def test_a_step_without_any_sample_ends_with_the_loaders_error() -> None:
    """On several ranks reading does not wait after a failure, and the memory has no captions."""
    step = step_of(Case(), ONE_RANK)
    pixels, tokens = captioned(BATCH)
    batch = host_batch(pixels, torch.zeros_like(tokens))
    with pytest.raises(DataError, match="no usable sample"):
        run_step(step, batch, failure=DataError("no usable sample"))
