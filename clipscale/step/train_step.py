"""One exact optimizer step over the global batch: encode, loss, replay, update."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import UserError, clear_frames
from clipscale.common.rng import RandomState
from clipscale.common.signals import Poll
from clipscale.data.loader.host_batch import HostBatch
from clipscale.distributed.agreement import raise_on_all_ranks, run_on_all_ranks
from clipscale.distributed.fsdp import reshard
from clipscale.distributed.parallel import gradient_norm, sum_gradients
from clipscale.distributed.world import World
from clipscale.models.towers import ClipModel
from clipscale.step.batch_loss import LossOptions
from clipscale.step.batch_passes import BatchPasses
from clipscale.step.batch_stream import BatchStream
from clipscale.step.cache.batch_norm import snapshot_batch_norm
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.ema import WeightEma
from clipscale.step.feature_statistics import STATISTICS_INTERVAL, PendingStatistics, start_statistics
from clipscale.step.measurements import StepTimer
from clipscale.step.memory import measured_keep_bytes, out_of_memory_as_user_error
from clipscale.step.optim import set_lr
from clipscale.step.precision import Precision
from clipscale.step.step_loss import StepScalars

# The logit scale is clamped to this after each step, as in CLIP.
MAX_LOGIT_SCALE = 100.0


@dataclass(frozen=True)
class StepResult:
    """The result of a step, for the run's loop."""

    scalars: StepScalars
    # Whether any rank asks for a checkpoint after this step.
    wants_save: bool
    timer: StepTimer
    # Seconds of the step in which this rank waited for samples.
    waited_s: float
    # Padded length in tokens -> how many texts the text tower computed at it.
    texts_by_seq_len: dict[int, int]
    # Statistics of the features; None on other ranks than 0 and in most steps.
    statistics: PendingStatistics | None


@dataclass
class TrainStep:
    """Turns a batch into new weights, on one rank."""

    world: World
    model: ClipModel
    # The two passes of the towers, or of a captioner's one encoder of pairs.
    passes: BatchPasses
    precision: Precision
    optimizer: torch.optim.Optimizer
    # The moving average of the weights; None if the run keeps none.
    ema: WeightEma | None
    # Largest global gradient norm. None or 0: gradients are not clipped.
    clip_norm: float | None
    # The cache's chunk sizes, which a checkpoint holds.
    chunk_sizes: ChunkSizes
    # Whether an update has begun and not ended. If an error ends it, some weights may be updated and others not.
    is_updating: bool = False

    def run(
        self, batch: HostBatch, stream: BatchStream, step: int, *, lr: float, wants_save: bool, before_chunk: Poll
    ) -> StepResult:
        """One step, with the gradient of the whole global batch. A collective.

        Args:
            stream: fills the batch meanwhile. If it fails on a rank, no rank updates its weights.
            step: the step's number, from 1. Messages name it, and it decides whether statistics are computed.
            lr: the step's learning rate.
            wants_save: whether this rank asks for a checkpoint after the step; see `StepResult.wants_save`.
            before_chunk: called before each chunk of both passes. What it raises ends the step.

        Raises UserError if training has diverged or memory is short; the error of a rank's stream, on all ranks:
        DataError, or SignalError if a signal ended a wait for samples; and what `before_chunk` raises.
        """
        timer = StepTimer(self.world.device)
        waited_before = stream.waited_s
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad()
        with self.phase(timer, "encode", step):
            features, texts = self.passes.encode(batch, before_chunk)
        with out_of_memory_as_user_error(self.cache, self.chunk_sizes, "statistics", step):
            statistics = self.start_statistics(features, step)
        with self.phase(timer, "loss", step):
            loss = self.cache.loss(*features, **self.loss_options(batch))
            self.cache.backward(loss)
            del features
        with self.phase(timer, "replay", step):
            # The message travels during the replay.
            next_step_sync = self.passes.start_next_step_sync(stream.upcoming(), wants_save=wants_save)
            self.passes.replay(before_chunk)
        with self.phase(timer, "optim", step):
            step_loss = self.passes.step_loss(loss)
            if stream.failure:
                self.poison_gradients()
            self.sum_and_unscale_gradients()
            norm = gradient_norm(self.trainable_parameters)
            scalars = StepScalars.read(step_loss, norm)  # the host waits for the device here
            self.check_scalars(scalars, stream, step)
            self.is_updating = True
            self.update(norm, overflows=scalars.overflows)
            self.is_updating = False
        return StepResult(
            scalars=scalars,
            wants_save=next_step_sync.result.wants_save,
            timer=timer,
            waited_s=stream.waited_s - waited_before,
            texts_by_seq_len=texts.widths(),
            statistics=statistics,
        )

    # ---- parts of a step, in their order ----

    def start_statistics(self, features: list[Tensor], step: int) -> PendingStatistics | None:
        """Begin to compute the statistics of the features, on rank 0 in some steps; else None."""
        if not self.world.is_rank0 or (step > 1 and step % STATISTICS_INTERVAL):
            return None
        return start_statistics(*self.passes.paired_features(features))

    def loss_options(self, batch: HostBatch) -> LossOptions:
        """The keywords of the loss, on the device. Waits for all samples."""
        device = self.world.device
        return {
            "sameness_keys": batch.sameness_keys().to(device, non_blocking=True),
            "teacher_features": [rows.to(device, non_blocking=True) for rows in batch.teachers()],
        }

    def sum_and_unscale_gradients(self) -> None:
        """Sum the gradients of scale and bias over ranks, as the replay does for the towers. A collective.

        With fp16 also divide all gradients by the scale of the loss.
        """
        sum_gradients(self.world, [self.model.logit_scale, self.model.logit_bias])
        if self.precision.scaler:
            self.precision.scaler.unscale_(self.optimizer)

    def update(self, norm: Tensor, *, overflows: bool = False) -> None:
        """Clip the gradients by their `norm`, update the weights, clamp the logit scale, and update the average.

        `overflows`: gradients of fp16 are not finite. Then the scaler skips the update on all ranks, and the average
        stays.
        """
        if self.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.trainable_parameters, self.clip_norm, norm)
        scaler = self.precision.scaler
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))
        if self.ema and not overflows:
            self.ema.update()

    @property
    def cache(self) -> GradCache:
        """The gradient cache of the passes. Its loss calls a `BatchLoss`."""
        return self.passes.cache

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters of the optimizer, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def logit_scale(self) -> Tensor:
        """The logit scale, a multiplier."""
        return self.model.logit_scale.exp()

    # ---- checks of a step ----

    @contextmanager
    def phase(self, timer: StepTimer, name: str, step: int) -> Iterator[None]:
        """Context of a phase of a step, which the timer measures. Raises as `out_of_memory_as_user_error` does."""
        with out_of_memory_as_user_error(self.cache, self.chunk_sizes, name, step), timer(name):
            yield

    def poison_gradients(self) -> None:
        """Let no rank update its weights, because this rank's stream has failed.

        Sets this rank's gradient of the logit scale to NaN. Its sum over ranks is NaN, and so is the gradient norm on
        every rank, which `check_scalars` refuses.
        """
        assert self.model.logit_scale.grad is not None
        self.model.logit_scale.grad.fill_(math.nan)

    def check_scalars(self, scalars: StepScalars, stream: BatchStream, step: int) -> None:
        """Raise if the loss or the gradient norm is not finite; with fp16 only the norm counts. A collective if so.

        Raises the error of a rank whose stream has failed, or else UserError: training has diverged. An overflow of
        fp16 raises nothing as long as the scaler can lower its scale: it then skips this update.
        """
        is_good = not scalars.overflows if self.precision.scaler else scalars.is_finite
        if is_good:
            return
        run_on_all_ranks(self.world, stream.raise_failure)
        if not self.precision.can_lower_loss_scale:
            raise_on_all_ranks(
                UserError(
                    f"step {step}: loss={scalars.loss}, gradient norm={scalars.grad_norm}: training has diverged; its "
                    "checkpoints are intact; lower optim.lr, set optim.clip_norm, or use another precision"
                )
            )

    # ---- around a step ----

    @contextmanager
    def rollback_on_error(self, stream: BatchStream) -> Iterator[None]:
        """Undo a step that an error or a signal ends, so that a resume repeats it bit for bit.

        Restores random states and the statistics of batch normalisation, and discards the batch, so that the stream's
        position is the one before the step. Frees the step's memory, which a save may need.
        """
        random = RandomState.now(self.world.device)
        restore_statistics = snapshot_batch_norm(self.model)
        try:
            yield
        except Exception as error:
            self.cache.discard_step()
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                clear_frames(error)
            random.restore()
            restore_statistics()
            stream.discard_last_batch()
            self.passes.discard_next_step_sync()
            reshard(self.model)  # the error may have left FSDP2's weights gathered
            raise

    def num_chunk_passes(self, local_batch: int) -> int:
        """The number of calls of `before_chunk` in a step; see `GradCache.num_chunk_passes`."""
        return self.cache.num_chunk_passes(local_batch)

    def size_graph_budget(self, timer: StepTimer) -> None:
        """With `cache.keep=auto`, after the first update, set the memory for kept graphs to what this step left free.

        A collective in that step. Later calls do nothing.
        """
        if self.cache.graph_budget.awaits_limit:
            self.optimizer.zero_grad()  # free memory is measured without gradients; the timer's peaks include them
            self.cache.keep_bytes = measured_keep_bytes(self.world, timer, self.cache.graph_bytes)

    @contextmanager
    def weights_for_evaluation(self, *, uses_ema: bool) -> Iterator[None]:
        """Context of an evaluation of the model. `uses_ema`: with its averaged weights, if there is an average."""
        ema = self.ema if uses_ema else None
        try:
            with ema.swapped_in() if ema else nullcontext():
                yield
        finally:
            reshard(self.model)
