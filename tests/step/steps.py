"""A real step of training with two small towers, and batches that have arrived, for tests of the step."""

import numpy as np
import torch
from torch import Tensor

from clipscale.common.batch import ONE_CAPTION, ChunkSizes
from clipscale.data.loader.host_batch import BatchLayout, HostBatch
from clipscale.data.shards.features import TeacherFeatures
from clipscale.data.tokenizer import Padding
from clipscale.distributed.parallel import wrap
from clipscale.distributed.world import World
from clipscale.step.batch_loss import BatchLoss
from clipscale.step.batch_passes import TwoTowerPasses
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.precision import Precision
from clipscale.step.tower_inputs import TowerInputs
from clipscale.step.train_step import StepResult, TrainStep
from tests.support.checkpoints import ONE_RANK
from tests.support.towers import PIXELS, TOKENS, captioned, small_model


def small_step(
    precision: str = "fp32",
    *,
    world: World = ONE_RANK,
    parallel: str = "ddp",
    chunk: int = 5,
    bias: float | None = None,
) -> TrainStep:
    """A step of two small towers, with sorted captions and plain gradient descent.

    `chunk`: samples of a chunk. `bias`: the logit bias of the sigmoid loss; None: the loss is the softmax.
    """
    model = small_model(init_bias=bias)
    formats = Precision.set_up(precision, world.device)
    cache = GradCache(
        [wrap(world, tower, parallel, formats.dtype) for tower in (model.image, model.text)],
        BatchLoss(model, formats.autocast, "softmax" if bias is None else "sigmoid"),
        chunks=chunk,
        autocast=formats.autocast,
        scaler=formats.scaler,
    )
    inputs = TowerInputs(world, stays_on_device=False, sorts_captions=True)
    return TrainStep(
        world=world,
        model=model,
        passes=TwoTowerPasses(cache, inputs, ONE_CAPTION),
        precision=formats,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ema=None,
        clip_norm=None,
        chunk_sizes=ChunkSizes(chunk, chunk, "cpu"),
    )


def host_batch(
    pixels: Tensor,
    tokens: Tensor,
    keys: np.ndarray | None = None,
    teachers: dict[TeacherFeatures, Tensor] | None = None,
) -> HostBatch:
    """A batch that has arrived. `keys`: the samples' sameness keys. `teachers`: each with its features (n, 2, D_k)."""
    teachers = teachers or {}
    slot = {
        "pixels": pixels.numpy(),
        "tokens": tokens.int().numpy(),
        "lengths": Padding(0).lengths(tokens.numpy()).astype(np.int16),
        "sameness_keys": np.arange(len(pixels)) if keys is None else keys,
        **{teacher.member: features.numpy() for teacher, features in teachers.items()},
    }
    layout = BatchLayout(1, len(pixels), PIXELS, TOKENS, teachers=tuple(teachers))
    return HostBatch(slot, layout, lambda stop: None)


def small_batch(size: int = 12, seed: int = 1) -> HostBatch:
    """A batch of pairs that has arrived, with captions of several lengths."""
    return host_batch(*captioned(size, seed))


class ArrivedStream:
    """What a step reads of a `TrainStream` whose batches have arrived, or which has failed."""

    waited_s = 0.0

    def __init__(self, upcoming: HostBatch | None = None, failure: Exception | None = None) -> None:
        """`upcoming`: the batch of the next step; None if it has not arrived."""
        self._upcoming = upcoming
        self.failure = failure
        self.num_discarded = 0

    def upcoming(self) -> HostBatch | None:
        return self._upcoming

    def raise_failure(self) -> None:
        if self.failure:
            raise self.failure

    def discard_last_batch(self) -> None:
        self._upcoming = None
        self.num_discarded += 1


def run_step(
    step: TrainStep,
    batch: HostBatch,
    number: int = 1,
    *,
    upcoming: HostBatch | None = None,
    failure: Exception | None = None,
    wants_save: bool = False,
    stream: ArrivedStream | None = None,
) -> StepResult:
    """Run a step over the batch, at the optimizer's own rate.

    `stream`: fills the batch; None: one that `upcoming` and `failure` describe (see `ArrivedStream`).
    """
    stream = stream or ArrivedStream(upcoming, failure)
    lr = step.optimizer.param_groups[0]["lr"]
    return step.run(batch, stream, number, lr=lr, wants_save=wants_save, before_chunk=lambda: None)
