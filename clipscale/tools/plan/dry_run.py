"""Runs the trainer's own passes, loss and update on tensors without memory, and measures the memory that they take.

All sizes in bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.common.modules import is_frozen
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader.sorted_texts import WIDTH_MULTIPLE
from clipscale.data.shards.features import TeacherFeatures
from clipscale.loss.choices import auto_exchange, num_simulated_ranks
from clipscale.loss.runtime import running_on
from clipscale.models.families import may_cut_captions
from clipscale.models.flops import PassFlops, decoder_flops, image_flops, text_flops, trained_names
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.load_weights import without_weights
from clipscale.step.cache.cast_weights import CastWeights
from clipscale.step.cache.encoder_io import ChunkOutput
from clipscale.step.pair_encoder import PairEncoder, pair_encoder
from clipscale.step.train_step import TrainStep
from clipscale.tools.plan.assumed import ASSUMED
from clipscale.tools.plan.block_meter import BlockMeter, leave_blocks_out
from clipscale.tools.plan.dry_step import assumed_teachers, build_dry_step
from clipscale.tools.plan.memory_tracker import DryRunRuntime, MemoryTracker, cuda_autocast, without_memory
from clipscale.tools.plan.state_memory import StateMemory, divided_among_ranks, state_memory


class Row(NamedTuple):
    """Shape and type of a row of a tower's input."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterCounts:
    """The number of a model's parameters, as single numbers."""

    all: int
    trained: int

    @staticmethod
    def of_model(model: nn.Module) -> "ParameterCounts":
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        return ParameterCounts(sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains))


@dataclass(frozen=True)
class ChunkMemory:
    """Memory of one chunk of a tower, beyond what is live before it."""

    # Peak of the first pass, without a graph.
    encode: float
    # Bytes of the graph; 0 for a frozen tower.
    graph: float = 0
    # Peak of a first pass that keeps its graph, beyond the graph.
    encode_kept: float = 0
    # Peak of the second pass.
    replay: float = 0
    # Operations of the first pass without a graph, and of the second one.
    encode_operations: int = 0
    replay_operations: int = 0


@dataclass
class DryRun:
    """One rank of a run, with tensors of the tracker. `dry_run` builds it."""

    config: TrainConfig
    tracker: MemoryTracker
    step: TrainStep
    # The modules of both towers' passes. For a captioner these are its encoder of pairs and an empty module.
    towers: tuple[nn.Module, nn.Module]
    # Whether each tower has a second pass. A captioner's encoder of pairs counts as the image tower.
    trained: Sequence[bool]
    # See `TrainConfig.trains_captioner`, which reads a file.
    trains_captioner: bool
    # The teachers of the distillation.
    teachers: tuple[TeacherFeatures, ...]
    # The share of the context's tokens that the text tower computes for an average caption: 1, or less if captions are
    # sorted by their length (see `TowerInputs`).
    caption_share: float
    # FLOPs of a picture, and of a caption as long as the context.
    flops: tuple[PassFlops, PassFlops]
    # FLOPs of a caption in a captioner's decoder, which runs only in the second pass.
    decoder_flops: PassFlops
    memory: StateMemory
    # The meter of each tower's passes.
    meters: list[BlockMeter]
    # The model's parameters, including the blocks that are left out.
    parameters: ParameterCounts
    # Whether there is no other rank.
    is_alone: bool

    @property
    def model(self) -> ClipModel:
        return self.step.model

    @property
    def texts_per_sample(self) -> int:
        """Captions and hard negatives of a sample."""
        return self.config.data.text_layout.texts_per_sample

    @property
    def inputs(self) -> tuple[Row, Row]:
        """A row of each tower's input."""
        side = self.model.image_size
        length = self.model.context_length
        return Row((3, side, side), torch.uint8), Row((length,), torch.int32)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row of each tower's input."""
        image, text = self.inputs
        return (image.nbytes + text.nbytes, 0) if self.trains_captioner else (image.nbytes, text.nbytes)

    @cached_property
    def image_output_bytes(self) -> int:
        """Bytes of a captioner's frozen image tower's output for one image; 0 for other models."""
        if not self.trains_captioner or not is_frozen(self.model.image):
            return 0
        image, _ = self.inputs
        with torch.no_grad(), self.step.precision.autocast():
            outputs = self.model.image(torch.empty(1, *image.shape, dtype=image.dtype), with_tokens=True)
        return sum(rows.nbytes for rows in outputs)

    @cached_property
    def passes(self) -> Callable[[int, int, bool, bool], ChunkMemory]:
        """`measure_passes` with a cache: each chunk is measured once."""
        return cache(self.measure_passes)

    @cached_property
    def loss(self) -> Callable[[int], int]:
        """`measure_loss` with a cache: each batch is measured once."""
        return cache(self.measure_loss)

    def measure_passes(self, tower: int, size: int, no_gradients: bool, only_chunk: bool) -> ChunkMemory:
        """Measure a chunk of `size` rows of the image (0) or the text tower (1).

        `no_gradients`: no gradients exist yet. `only_chunk`: the tower has no other chunk.
        """
        if tower == 1 and self.trains_captioner:
            return ChunkMemory(0)
        meter = self.meters[tower]
        encoder = self.step.cache.encoders[tower]
        rows = self.inputs if self.trains_captioner else self.inputs[tower : tower + 1]
        cast_weights = CastWeights()
        if self.memory.cast_weights[tower]:
            cast_weights.start_step(encoder, self.step.precision.autocast, 1 if only_chunk else 2)

        def encoded() -> list[Tensor]:
            meter.start()
            with (
                self.step.precision.autocast(),
                cast_weights.in_pass(builds_graph=torch.is_grad_enabled(), is_last_backward=False),
            ):
                out = encoder(*(torch.empty(size, *row.shape, dtype=row.dtype) for row in rows))
            parts = out if isinstance(out, ChunkOutput) else (out,)
            return [part for part in parts if isinstance(part, Tensor)]

        with torch.no_grad():
            encoded()
        encode = meter.end()
        encode_operations = meter.operations
        if not self.trained[tower]:
            return ChunkMemory(encode, encode_operations=encode_operations)
        for p in self.towers[tower].parameters():
            p.grad = torch.empty_like(p) if p.requires_grad and not no_gradients else None
        outputs = encoded()
        graph = meter.live()
        encode_kept = meter.end() - graph
        meter.is_backward = True
        with cast_weights.in_pass(builds_graph=True, is_last_backward=False):  # checkpointing runs the layers again
            torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
        replay = meter.end()
        operations = meter.operations
        self.step.optimizer.zero_grad()
        return ChunkMemory(
            encode=encode,
            graph=graph,
            encode_kept=encode_kept,
            replay=replay,
            encode_operations=encode_operations,
            replay_operations=operations,
        )

    def measure_loss(self, batch: int) -> int:
        """Bytes that the loss of `batch` samples of this rank and its gradients take, beyond the features."""
        size = ASSUMED.linear_from_samples
        if batch > 2 * size:
            low = self.loss(size)
            high = self.loss(2 * size)
            return round(high + (batch / size - 2) * (high - low))
        rows = batch, batch * self.texts_per_sample
        features = [
            torch.empty(size, self.model.embed_dim).requires_grad_(trained) for size, trained in zip(rows, self.trained)
        ]
        if self.trains_captioner:
            features = [torch.empty(batch, 2, self.model.embed_dim).requires_grad_()]
        self.tracker.take_peak()
        before = self.tracker.live
        self.step.cache.loss(
            *features,
            sameness_keys=torch.empty(batch, dtype=torch.int64),
            teacher_features=[
                torch.empty(batch, *array.shape, dtype=getattr(torch, array.dtype)) for array in self.teachers
            ],
        ).backward()
        self.step.optimizer.zero_grad()
        return self.tracker.take_peak() - before


def exchange_of_batch(config: TrainConfig, width: int, nodes: int, *, on_gpu: bool) -> str:
    """The exchange that `auto` stands for with the whole batch, of which a dry run computes only parts."""
    itemsize = 4 if config.precision == "fp32" else 2
    num_texts = config.batch * config.data.text_layout.texts_per_sample
    return auto_exchange(nodes, num_texts * width, itemsize, on_gpu)


@contextmanager
def dry_run(config: TrainConfig, world_size: int, capability: int | None, nodes: int = 1) -> Iterator[DryRun]:
    """Build a dry run of one of `world_size` ranks. Raises UserError.

    `capability`: the compute capability of its GPU; None for a process on CPUs.
    """
    with torch.device("meta"):
        model = build_model(without_weights(config.model))
    exchange = config.loss.exchange
    if exchange == "auto":
        exchange = exchange_of_batch(config, model.embed_dim, nodes, on_gpu=capability is not None)
        config = replace(config, loss=replace(config.loss, exchange=exchange))
    ranks_of_node = world_size // nodes
    image, text = (trained_names(tower.encoder) for tower in (model.image, model.text))
    flops = image_flops(config.model, image), text_flops(config.model, text)
    decoder = PassFlops(0, 0)
    if config.trains_captioner:
        assert model.decoder is not None
        decoder = decoder_flops(config.model, trained_names(model.decoder))
    caption_share = 1.0  # takes more memory, so it is safe where the tokenizer is missing
    with suppress(UserError, OSError):
        if may_cut_captions(model.text.encoder, model.tokenizer):
            mean_width = round(ASSUMED.caption_tokens + WIDTH_MULTIPLE / 2)
            caption_share = min(1.0, mean_width / model.context_length)
    teachers = assumed_teachers(config, model)
    runtime = DryRunRuntime(capability, num_simulated_ranks(exchange, world_size, ranks_of_node), ranks_of_node)
    with without_memory() as tracker, cuda_autocast() if capability else nullcontext(), running_on(runtime):
        before = tracker.live
        step = build_dry_step(config, model, teachers, on_gpu=capability is not None)
        parameters = ParameterCounts.of_model(model)
        towers = (pair_encoder(model), nn.Module()) if config.trains_captioner else (model.image, model.text)
        memory = state_memory(step, towers, tracker, before)
        if world_size > 1:
            wrapped = [[*tower.captioner.children()] if isinstance(tower, PairEncoder) else [tower] for tower in towers]
            memory = divided_among_ranks(
                memory, model, wrapped, step.precision.dtype, world_size, config.launch.parallel
            )
        meters = [leave_blocks_out(tower, tracker) for tower in towers]
        yield DryRun(
            config=config,
            tracker=tracker,
            step=step,
            towers=towers,
            trained=[*step.cache.has_second_pass, False][:2],
            trains_captioner=config.trains_captioner,
            teachers=teachers,
            caption_share=caption_share,
            flops=flops,
            decoder_flops=decoder,
            memory=memory,
            meters=meters,
            parameters=parameters,
            is_alone=world_size == 1,
        )
