"""Checks of settings that span sections, and need neither machine nor data. Each section checks its own settings."""

import math
import re

from clipscale.common.errors import UserError
from clipscale.common.remote import check_copy_address
from clipscale.config.sections import CaptionConfig
from clipscale.config.train_config import TrainConfig, samples_of
from clipscale.loss.objective import OBJECTIVES


def check_across_sections(config: TrainConfig) -> None:
    """Raise UserError for the first mistake that spans sections."""
    check_data(config)
    if not config.model.weights:  # weights may bring a model
        check_captioner(config)
    if re.match(r"[a-z][a-z0-9+.-]+:/", config.run, re.IGNORECASE):
        raise UserError(
            f"run={config.run}: a run's folder is a path and no address; give run=NAME, and checkpoint.copy=ADDRESS "
            "for a copy there"
        )
    check_copy_address(config.checkpoint.copy)
    if config.checkpoint.best and not config.eval.every:
        raise UserError(f"checkpoint.best={config.checkpoint.best}: nothing is evaluated in between; give eval.every=N")
    if config.samples is not None and config.epochs is not None:
        raise UserError(
            f"samples={config.samples} and epochs={config.epochs}: give the length of the run with one of them"
        )
    if config.eval.weights == "ema" and not config.ema:
        raise UserError("eval.weights=ema: this run keeps no average; give ema=0.9999, or eval.weights=trained")
    if config.sweep.metric and not config.eval.has_sets:
        raise UserError(f"sweep.metric={config.sweep.metric}: nothing is evaluated; give eval.sets=FOLDER")
    width = config.model.description.get("embed_dim", math.inf)
    if any(size >= width for size in config.loss.sizes):
        raise UserError(f"loss.sizes={config.loss.sizes}: the features of this model have {width} numbers; give fewer")
    _ = config.total_samples
    procs = config.launch.procs
    for stage_config in config.stage_configs:
        check_divisible(stage_config.batch, procs or 1, f"launch.procs={procs} processes")
        check_sigmoid(stage_config)
        stage_config.schedule.check()
        if stage_config.samples is not None:
            samples_of(stage_config, None)


def check_data(config: TrainConfig) -> None:
    """Raise UserError if `data.train` is not set, or if settings of captions, keys, teachers and kernels conflict."""
    data = config.data
    if not data.train:
        raise UserError("data.train is not set; give shards, data.train='/data/{00000..00099}.tar', or take data=demo")
    if config.distill.teachers and (data.captions_per_step > 1 or data.negatives):
        raise UserError(
            "distill.teachers: a teacher has seen one caption of a picture; leave data.captions_per_step and "
            "data.negatives out"
        )
    if config.loss.backend == "triton" and data.same is not None:
        raise UserError(f"loss.backend=triton: its kernels do not take data.same={data.same}; take loss.backend=auto")
    if config.loss.backend == "triton" and data.captions_per_step > 1:
        raise UserError(
            f"loss.backend=triton: its kernels take one caption an image, and "
            f"data.captions_per_step={data.captions_per_step}; take loss.backend=auto"
        )


def check_captioner(config: TrainConfig) -> None:
    """Raise UserError for settings of captions that do not go with the model. The settings are complete."""
    weight = config.caption.weight
    if not config.model.is_captioner and weight != CaptionConfig().weight:
        raise UserError(f"caption.weight={weight:g}: {config.model.name} has no decoder; take model=coca-b32")
    if not config.trains_captioner:
        return
    if config.data.captions_per_step > 1 or config.data.negatives:
        raise UserError(
            "data.captions_per_step and data.negatives: a captioner writes the one caption of a picture; leave them "
            "out, or train its contrast alone with caption.weight=0"
        )
    if len({*config.cache.sizes}) > 1:
        raise UserError(f"cache.chunk=[{','.join(config.cache.chunk)}]: a captioner's chunks are pairs; give one size")


def check_sigmoid(config: TrainConfig) -> None:
    """Raise UserError for the sigmoid loss without an initial bias."""
    name = config.loss.objective
    if OBJECTIVES[name].needs_bias and config.model.init_bias is None and not config.model.weights:
        raise UserError(f"loss.objective={name} needs its scale and bias: take loss=siglip, or give model.init_bias")


def check_divisible(batch: int, count: int, among: str, remedy: str = "") -> None:
    """Raise UserError for a batch that `count` processes cannot share evenly; the message calls them `among`."""
    if batch % count:
        raise UserError(f"batch={batch} cannot be shared evenly by {among}; choose a multiple of {count}{remedy}")
