"""Builds the step of a run: loss, passes, optimizer, average. `clipscale plan` builds the same for its dry run."""

from collections.abc import Sequence
from functools import partial

from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import UserError
from clipscale.common.modules import is_frozen
from clipscale.config.data import DataConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.shards.features import TeacherFeatures
from clipscale.data.shards.subset import subset_of
from clipscale.distributed.parallel import wrap
from clipscale.distributed.world import World
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.towers import ClipModel
from clipscale.step.batch_loss import BatchLoss
from clipscale.step.batch_passes import BatchPasses, TwoTowerPasses
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.captioner_passes import CaptionerPasses
from clipscale.step.ema import WeightEma
from clipscale.step.optim import build_optimizer
from clipscale.step.pair_encoder import wrapped_pair_encoder
from clipscale.step.precision import Precision
from clipscale.step.tower_inputs import TowerInputs
from clipscale.step.train_step import TrainStep


def build_step(
    config: TrainConfig,
    world: World,
    model: ClipModel,
    precision: Precision,
    chunk_sizes: ChunkSizes,
    teachers: Sequence[TeacherFeatures] = (),
    *,
    sorts_captions: bool = False,
) -> TrainStep:
    """Build the step of a model with its initial weights: loss, passes, optimizer, average. A collective.

    Here the settings of a step end: what it calls gets plain values, or its own section.

    `sorts_captions`: see TowerInputs. Raises UserError.
    """
    loss = build_loss(config, model, precision, teachers)
    passes = build_passes(config, world, model, precision, chunk_sizes, loss, sorts_captions=sorts_captions)
    # The optimizer comes after the passes have wrapped the towers, because FSDP2 replaces parameters by sharded ones.
    optimizer = build_optimizer(
        model, config.optim, is_sharded=config.launch.parallel != "ddp", lr_factors=model.lr_factors(config.model)
    )
    return TrainStep(
        world=world,
        model=model,
        passes=passes,
        precision=precision,
        optimizer=optimizer,
        ema=WeightEma(config.ema, model) if config.ema else None,
        clip_norm=config.optim.clip_norm,
        chunk_sizes=chunk_sizes,
    )


def build_loss(
    config: TrainConfig, model: ClipModel, precision: Precision, teachers: Sequence[TeacherFeatures]
) -> BatchLoss:
    """The loss of a batch's features. Raises UserError if the model or the data do not fit it."""
    repeats = samples_repeat(config.data)
    check_loss_fits(config.loss.objective, config.loss.backend, model, config.data.sample_weights if repeats else None)
    return BatchLoss(
        model,
        autocast=precision.autocast,
        objective_name=config.loss.objective,
        exchange_name=config.loss.exchange,
        backend_name=config.loss.backend,
        feature_sizes=tuple(config.loss.sizes),
        captions_per_image=config.data.text_layout.captions,
        uses_sameness_keys=config.data.same is not None or repeats,
        teacher_scales=tuple(teacher.scale for teacher in teachers),
        distill_weights=config.distill.weights,
    )


def build_passes(
    config: TrainConfig,
    world: World,
    model: ClipModel,
    precision: Precision,
    chunk_sizes: ChunkSizes,
    loss: BatchLoss,
    *,
    sorts_captions: bool,
) -> BatchPasses:
    """The two passes of the towers, or of a captioner's encoder of pairs, wrapped for several ranks. A collective."""
    parallel = config.launch.parallel
    inputs = TowerInputs(
        world,
        stays_on_device=config.offload == "none",
        sorts_captions=sorts_captions,
        has_equal_chunks=config.trains_captioner,
    )
    make_cache = partial(
        GradCache, keep_bytes=config.cache.keep_bytes, autocast=precision.autocast, scaler=precision.scaler
    )
    if config.trains_captioner:
        pairs = wrapped_pair_encoder(model, world, parallel, precision.dtype)
        return CaptionerPasses(
            cache=make_cache([pairs], loss.loss_of_pairs, chunks=[chunk_sizes.image]),
            inputs=inputs,
            caption_weight=config.caption.weight,
            frozen_images=model.image if is_frozen(model.image) else None,
            autocast=precision.autocast,
        )
    towers = [wrap(world, tower, parallel, precision.dtype) for tower in (model.image, model.text)]
    if model.decoder is not None:
        model.decoder.requires_grad_(False)
    return TwoTowerPasses(
        cache=make_cache(towers, loss, chunks=[chunk_sizes.image, chunk_sizes.text]),
        inputs=inputs,
        text_layout=config.data.text_layout,
    )


def check_loss_fits(objective_name: str, backend_name: str, model: ClipModel, sample_weights: str | None) -> None:
    """Raise UserError for kernels that do not take a sample twice in a batch, as `sample_weights` may ask for, and for
    a model without the bias that the objective needs."""
    if sample_weights is not None and backend_name == "triton":
        raise UserError(
            f"loss.backend=triton: its kernels do not take a sample twice in a batch, as "
            f"data.sample_weights={sample_weights} asks for; take loss.backend=auto"
        )
    if OBJECTIVES[objective_name].needs_bias and model.logit_bias is None:
        raise UserError(
            f"loss.objective={objective_name}: the model of these weights has no logit bias; give "
            "model.init_bias=-10, or take loss=clip"
        )


def samples_repeat(data: DataConfig) -> bool:
    """Whether sample weights may put a sample into an epoch twice, and so into a batch. Raises UserError."""
    subset = subset_of(data)
    return subset is not None and subset.table.max_copies > 1
