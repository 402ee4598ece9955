"""One exact optimizer step over the global batch: encode, loss, replay, update."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from clipscale.checkpoint.state import ChunkSizes
from clipscale.common.errors import UserError, one_line
from clipscale.common.phases import Readback, StepTimer
from clipscale.data.loader.captions import SortedCaptions
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.stream import TrainStream
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import World, gradient_norm
from clipscale.models.towers import ClipModel, frozen
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.cache.keep_budget import measured_budget
from clipscale.step.ema import WeightAverage
from clipscale.step.feature_statistics import EVERY_STEPS, PendingStatistics, begin_statistics
from clipscale.step.frozen_images import FrozenImages
from clipscale.step.next_step_info import NextStepInfo
from clipscale.step.precision import Precision
from clipscale.step.step_inputs import StepInputs

# The logit scale is clamped to this after each step, as in CLIP.
MAX_LOGIT_SCALE = 100.0


class Targets(TypedDict):
    """What BatchLoss takes beside the features."""

    # (N,) int64, equal for samples that are the same.
    keys: Tensor
    # For each teacher (N, 2, D).
    teachers: list[Tensor]


class LossTerms(TypedDict, total=False):
    """A captioner's two losses, without their weights, by their names in metrics.jsonl."""

    contrastive_loss: float
    caption_loss: float


@dataclass(frozen=True)
class StepResult:
    """What a step returns to the run's loop."""

    loss: float
    # Empty: the loss has one term alone.
    loss_terms: LossTerms
    # None: the loss or the norm is not finite, and the weights are unchanged.
    grad_norm: float | None
    next_step: NextStepInfo
    phases: StepTimer
    # Width in tokens -> captions that the text tower computed at it.
    widths: dict[int, int]
    # Statistics of the features; None on other ranks than 0 and in most steps.
    statistics: PendingStatistics | None


@dataclass
class TrainStep:
    """Turns a batch into new weights, on one rank."""

    world: World
    model: ClipModel
    # The cache of both towers, or of a captioner's pairs. Its loss is a BatchLoss.
    cache: GradCache
    precision: Precision
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    # Largest global gradient norm. None or 0: gradients are not clipped.
    clip_norm: float | None
    inputs: StepInputs
    # The kind of device of the chunk sizes, which are the cache's.
    chunk_device: str
    # The weight of a captioner's loss, its mean cross entropy over the tokens of the global batch; the contrast's is 1.
    # 0: the model writes no captions, and the cache's encoders are the two towers.
    caption_weight: float = 0.0
    # Bytes of what a captioner's frozen image tower gives for one image, as an earlier step measured; 0: unknown.
    image_bytes: int = 0
    # Whether an update has begun and not ended. If an error ends it, the weights are those of no step.
    is_updating: bool = False

    def run(
        self, batch: HostBatch, stream: TrainStream, number: int, *, save: bool, poll: Callable[[], None]
    ) -> StepResult:
        """One step, with the gradient of the whole global batch. A collective.

        Args:
            stream: fills the batch meanwhile. If it fails on a rank, no rank updates its weights.
            number: the step's number, from 1, for messages.
            save: whether this rank wishes to save a checkpoint; see `NextStepInfo`.
            poll: called before each chunk of both passes. What it raises ends the step.

        Raises UserError if training has diverged or memory is short, DataError on all ranks if one rank's stream fails,
        and what `poll` raises.
        """
        phases = StepTimer(self.world.device)
        self.optimizer.zero_grad()
        with self.phase(phases, "encode", number):
            features, texts = self.encode(batch, poll)
            caption_tokens = self.inputs.num_caption_tokens(batch)
        statistics = self.statistics(features, number)
        with self.phase(phases, "loss", number):
            value = self.cache.loss(*features, **self.targets(batch))
            self.cache.backward(value)
            del features
        # The message travels during the replay.
        next_step = self.inputs.start_next_step_info(stream.upcoming(), self.cache.chunks[-1], wants_save=save)
        with self.phase(phases, "replay", number):
            self.cache.replay(poll, chunk_loss_weight=self.caption_weight / caption_tokens)
        with self.phase(phases, "optim", number):
            loss, parts, norm = self.finish(value, self.caption_loss(caption_tokens), stream, number)
        return StepResult(loss, parts, norm, next_step, phases, self.widths(texts), statistics)

    # ---- first pass ----

    def encode(self, batch: HostBatch, poll: Callable[[], None]) -> tuple[list[Tensor], ChunkLoader]:
        """The features of the batch, as the loss takes them; and the captions."""
        encode = self.encode_pairs if self.caption_weight else self.encode_towers
        return encode(batch, poll)

    def encode_towers(self, batch: HostBatch, poll: Callable[[], None]) -> tuple[list[Tensor], ChunkLoader]:
        """The features of images and of captions, (N, D) each; and the captions."""
        image_features = self.cache.encode_tower(0, self.inputs.images(batch), poll)
        texts = self.inputs.captions(batch, self.cache.chunks[1])
        return [image_features, self.cache.encode_tower(1, texts, poll)], texts

    def encode_pairs(self, batch: HostBatch, poll: Callable[[], None]) -> tuple[list[Tensor], ChunkLoader]:
        """The features of a captioner's pairs, (N, 2, D); and the captions."""
        pairs, texts = self.inputs.pairs(batch, self.cache.chunks[0])
        if not frozen(self.model.image):
            return [self.cache.encode_tower(0, pairs, poll)], texts
        reserved = min(self.cache.keep.bytes, len(batch) * self.image_bytes)
        images = FrozenImages(pairs.images, self.model.image, self.precision.autocast, reserved)
        pairs.images = images
        features = self.cache.encode_tower(0, pairs, poll, reserved=reserved)
        self.image_bytes = images.bytes_each
        return [features], texts

    def caption_loss(self, tokens: int) -> Tensor | None:
        """The mean cross entropy over so many tokens of all ranks, 0-d. None: the model writes no captions."""
        total = self.cache.chunk_loss
        if total is None:
            return None
        self.world.sum_(total)
        return total / tokens

    def targets(self, batch: HostBatch) -> Targets:
        """What the loss takes beside the features, on the device. Waits for all samples."""
        device = self.world.device
        return {
            "keys": batch.keys().to(device, non_blocking=True),
            "teachers": [rows.to(device, non_blocking=True) for rows in batch.teachers()],
        }

    def statistics(self, features: list[Tensor], number: int) -> PendingStatistics | None:
        """Begin the statistics of the features, on rank 0 in some steps; else None."""
        if not self.world.is_rank0 or (number > 1 and number % EVERY_STEPS):
            return None
        images, texts = features[0].unbind(1) if self.caption_weight else features
        return begin_statistics(images, texts)

    def widths(self, texts: ChunkLoader) -> dict[int, int]:
        """Width in tokens -> captions that the text tower computed at it."""
        return dict(texts.widths()) if isinstance(texts, SortedCaptions) else {self.model.context_length: len(texts)}

    @property
    def chunk_sizes(self) -> ChunkSizes:
        """Samples per chunk of each tower."""
        return ChunkSizes(self.cache.chunks[0], self.cache.chunks[-1], self.chunk_device)

    def set_keep_budget(self, phases: StepTimer) -> None:
        """After the first step, from the memory that it leaves free. A collective."""
        if self.cache.keep.is_unknown:
            self.optimizer.zero_grad()  # the phases' peaks have them already
            self.cache.keep = measured_budget(self.world, phases, self.cache.graph_bytes)

    @contextmanager
    def phase(self, phases: StepTimer, name: str, number: int) -> Iterator[None]:
        """Around a part of a step. Raises UserError if the device runs out of memory."""
        try:
            with phases(name):
                yield
        except torch.OutOfMemoryError as error:
            sizes = self.chunk_sizes
            graphs = sum(self.cache.kept)
            kept = f" with {graphs} kept graphs (cache.keep=none keeps none)" if graphs else ""
            raise UserError(
                f"step {number}: out of memory in {name}, in chunks of {sizes.image} images and {sizes.text} captions"
                f"{kept} ({one_line(error)}); clipscale plan with the settings of this run says what fits"
            ) from error

    # ---- update ----

    def finish(
        self, value: Tensor, caption_loss: Tensor | None, stream: TrainStream, number: int
    ) -> tuple[float, LossTerms, float | None]:
        """Update the weights if the loss and the gradients are finite. Returns the loss, its parts, and the norm.

        `value`: the contrastive loss. `caption_loss`: a captioner's, without its weight.
        The host waits for the device here, and in the loss's backward pass, which reads the logit scale.
        """
        if stream.failure:  # a NaN gradient makes the norm NaN on all ranks, so that none updates its weights
            assert self.model.logit_scale.grad is not None
            self.model.logit_scale.grad.fill_(math.nan)
        norm = self.gradient_norm()
        values = [value, norm] if caption_loss is None else [value, norm, caption_loss]
        loss, grad_norm, *of_captions = Readback.start(*values).read()
        parts: LossTerms = {}
        if of_captions:
            parts = {"contrastive_loss": loss, "caption_loss": of_captions[0]}
            loss += self.caption_weight * of_captions[0]
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if not finite:
            self.world.raise_together(stream.check)
            if not self.precision.can_lower_loss_scale:
                raise UserError(
                    f"step {number}: loss={loss}, gradient norm={grad_norm}: training has diverged; its checkpoints "
                    "are intact; lower optim.lr, set optim.clip_norm, or use another precision"
                ).of_all_ranks()
        if finite or self.precision.scaler:  # after an overflow the scaler skips the step and lowers its scale
            self.is_updating = True
            self.update(norm)
            self.is_updating = False
        return loss, parts, grad_norm if finite else None

    def gradient_norm(self) -> Tensor:
        """Sum the gradients of scale and bias over ranks and unscale all. Returns their global norm, 0-d."""
        self.world.sum_gradients([self.model.logit_scale, self.model.logit_bias])
        if self.precision.scaler:
            self.precision.scaler.unscale_(self.optimizer)
        return gradient_norm(self.trainable_parameters)

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def update(self, norm: Tensor) -> None:
        """Clip the gradients by their `norm`, update the weights, clamp the logit scale, and update the average.

        After an overflow the scaler skips the update on all ranks, and the average stays.
        """
        scaler = self.precision.scaler
        skipped = scaler is not None and not bool(norm.isfinite())
        if self.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.trainable_parameters, self.clip_norm, norm)
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))
        if self.average and not skipped:
            self.average.update()
