"""Builds the step of a planned run, as a start does, on tensors without memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import UserError
from clipscale.config.train_config import TrainConfig
from clipscale.data.shards.features import TeacherFeatures
from clipscale.distributed.world import World
from clipscale.models.lean import LeanDecoder
from clipscale.models.towers import ClipModel
from clipscale.start.build_step import build_step, samples_repeat
from clipscale.step.precision import AUTOCAST_DTYPES, Precision
from clipscale.step.train_step import TrainStep

CPU = torch.device("cpu")


def build_dry_step(
    config: TrainConfig, model: ClipModel, teachers: Sequence[TeacherFeatures], *, on_gpu: bool
) -> TrainStep:
    """Build the step of a run with the model on the meta device. `on_gpu`: whether the planned machine has GPUs.

    It has no gradient scaler, which takes only a few bytes: a scaler tests the values of gradients, and here are none.
    """
    give_memory(model)
    precision = Precision(AUTOCAST_DTYPES[config.precision], CPU)
    precision.cast_frozen_(model.image, model.text)
    chunk_sizes = ChunkSizes(1, 1, "")
    if isinstance(model.decoder, LeanDecoder):
        model.decoder.accepts_label_mask = False
    try:
        samples_repeat(config.data)
    except UserError:  # a plan needs no file of sample weights
        config = replace(config, data=replace(config.data, sample_weights=None, only_keys=None))
    step = build_step(config, World(0, 1, CPU), model, precision, chunk_sizes, teachers)
    if on_gpu:
        choose_foreach(step.optimizer)
    return step


def give_memory(model: nn.Module) -> None:
    """Replace tensors on the meta device by CPU tensors. `to_empty` is slow for tensors without values."""
    new: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            if p not in new:  # otherwise it is tied to another
                new[p] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
            module.register_parameter(name, cast(nn.Parameter, new[p]))
        for name, x in [*module.named_buffers(recurse=False)]:
            module.register_buffer(name, new.setdefault(x, torch.empty(x.shape, dtype=x.dtype)))


def assumed_teachers(config: TrainConfig, model: ClipModel) -> tuple[TeacherFeatures, ...]:
    """Teachers as wide as the model, in float16: a plan does not read the shards, which have their real widths."""
    return tuple(TeacherFeatures(f"{name}.npy", model.embed_dim, "float16", 1.0) for name in config.distill.teachers)


def choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let one of torch's optimizers update all tensors of a group at once if it would do so on CUDA."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
