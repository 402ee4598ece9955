"""Runs the trainer's own passes, loss and update on tensors without memory, and measures the memory that they take.

The blocks of a tower are alike, so two of them are run: what the first one adds counts for all that are left out.

b: samples of one rank, P: ranks, D: feature width. All sizes in bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from clipscale.checkpoint.saved import ChunkSizes
from clipscale.config.train import TrainConfig
from clipscale.data.features import TeacherFeatures
from clipscale.data.loader.captions import WIDTH_MULTIPLE
from clipscale.distributed import fsdp
from clipscale.distributed.world import World
from clipscale.loss.objective import auto_exchange
from clipscale.models.blocks import repeated_blocks
from clipscale.models.families import family_of
from clipscale.models.flops import PassFlops, decoder_flops, image_flops, text_flops, trained_of
from clipscale.models.lean import LeanDecoder
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import without_weights
from clipscale.start.build import batch_loss, build_step
from clipscale.step.cast_weights import CastWeights
from clipscale.step.chunk_output import ChunkOutput
from clipscale.step.pair_encoder import PairEncoder, pair_encoder
from clipscale.step.precision import DTYPES, Precision
from clipscale.step.train_step import TrainStep
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.memory_tracker import DryMachine, MemoryTracker, cuda_autocast, rounded, without_memory

CPU = torch.device("cpu")
# How many of the identical blocks are run.
BLOCKS = 2
# Most ranks in the ring of the loss: more hops take no more memory.
MAX_RING_RANKS = 4


class Row(NamedTuple):
    """Shape and type of a row of a tower's input."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model's weights are."""

    all: int
    trained: int

    @staticmethod
    def of(model: nn.Module) -> "Parameters":
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        return Parameters(sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains))


@dataclass(frozen=True)
class ChunkMemory:
    """Memory of one chunk of a tower, beyond what is live before it."""

    # Peak of the first pass, without a graph.
    encode: float
    # Bytes of the graph; 0 for a frozen tower.
    graph: float = 0
    # Peak of the second pass.
    replay: float = 0
    # Operations of the first pass without a graph, and of the second one.
    encode_operations: int = 0
    replay_operations: int = 0


@dataclass(frozen=True)
class GatheredWeights:
    """Weights of a tower that FSDP2 has gathered, in the type in which it gathers them."""

    # Bytes that are held from the first chunk to the last.
    held: int = 0
    # Further bytes in the first pass.
    encode: int = 0
    # Further bytes in the second pass, with gradients that are not yet summed.
    replay: int = 0

    @classmethod
    def of(cls, tower: nn.Module, parallel: str, dtype: torch.dtype) -> "GatheredWeights":
        """In stage 3 a block's weights are gathered while the one before computes."""
        type_of = fsdp.gathered_type(tower, dtype)

        def size(parameters: set[nn.Parameter]) -> int:
            return sum(p.numel() * type_of(p).itemsize for p in parameters)

        rest = everything = set(tower.parameters())
        block = 0
        for module in fsdp.blocks(tower):
            block = max(block, size(rest & set(module.parameters())))
            rest = rest - set(module.parameters())
        if parallel == "zero2":
            return cls(size(everything), 0, 2 * block)
        return cls(size(rest), 2 * block, 4 * block)


@dataclass(frozen=True)
class StateMemory:
    """What a rank holds beside a step's passes. Lists have an entry for each tower."""

    # Bytes between steps.
    state: int
    # Peak of an update beyond what is live before it.
    update: int
    # Gradient bytes, while a tower's chunks add to them.
    gradients: list[int]
    # Gradient bytes after a tower's last chunk. DDP: 0, as they are views of the buckets.
    summed: list[int]
    # Gradient bytes to add to a tower's replay if it has only one chunk.
    at_once: list[int]
    # Bytes of the weights that a step of several chunks casts once.
    casts: list[int]
    gathered: list[GatheredWeights]


@dataclass
class Meter:
    """Peak and growth of the memory of a pass, as if blocks that are left out ran too. `leave_blocks_out` makes it."""

    tracker: MemoryTracker
    # The number of blocks that are left out.
    omitted: int
    # Live bytes at the pass's start.
    base: int = 0
    # The pass's peak beyond them.
    peak: float = 0.0
    # Bytes that the blocks that are left out would add.
    added: float = 0.0
    # Live bytes when the first block was entered; None: outside of it.
    entered: int | None = None
    # Operations at the pass's start and when the first block was entered, and those of the blocks that are left out.
    operations_before: int = 0
    operations_entered: int = 0
    operations_added: int = 0
    is_backward: bool = False

    def start(self) -> None:
        self.base = self.tracker.live
        self.peak = 0.0
        self.added = 0.0
        self.entered = None
        self.is_backward = False
        self.operations_before = self.tracker.operations
        self.operations_added = 0
        self.tracker.take_peak()

    def live(self) -> float:
        """Bytes of the pass that are still live."""
        return self.tracker.live - self.base + self.added

    @property
    def operations(self) -> int:
        """Of the pass so far."""
        return self.tracker.operations - self.operations_before + self.operations_added

    def end(self) -> float:
        """The peak."""
        self._mark(False)
        return self.peak

    def enter(self, is_first: bool, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A pass enters the first or the second block. The backward pass visits them in reverse order."""
        if self.is_backward:  # checkpointing runs them again
            return
        self._mark(is_first)
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._mark(not is_first))

    def _mark(self, first_begins: bool) -> None:
        """The first block begins (`first_begins`) or ends, forward or backward."""
        peak = self.tracker.take_peak() - self.base
        self.peak = max(self.peak, peak + self.added)
        if self.entered is not None:  # as often as blocks are left out
            self.added += self.omitted * (self.tracker.live - self.entered)
            self.peak = max(self.peak, peak + self.added)
            self.operations_added += self.omitted * (self.tracker.operations - self.operations_entered)
        self.entered = self.tracker.live if first_begins else None
        self.operations_entered = self.tracker.operations


def leave_blocks_out(tower: nn.Module, tracker: MemoryTracker) -> Meter:
    """Keep BLOCKS of the tower's identical blocks. Returns a meter of the passes of the tower that is left. Nothing is
    left out of a captioner, whose blocks are of four kinds."""
    blocks, alike = ([], []) if isinstance(tower, PairEncoder) else repeated_blocks(tower)
    meter = Meter(tracker, len(alike[BLOCKS:]))
    for number, is_first in zip(alike[:BLOCKS], (True, False)):
        blocks[number].register_forward_pre_hook(partial(meter.enter, is_first))
    for number in reversed(alike[BLOCKS:]):
        del blocks[number]
    return meter


@dataclass
class DryRun:
    """One rank of a run, with tensors of the tracker. `dry_run` builds it."""

    config: TrainConfig
    tracker: MemoryTracker
    step: TrainStep
    # FLOPs of a picture, and of a caption as long as the context.
    flops: tuple[PassFlops, PassFlops]
    # Of a caption in a captioner's decoder, which has no first pass.
    decoder_flops: PassFlops
    memory: StateMemory
    # The meter of each tower's passes.
    meters: list[Meter]
    # The model's parameters, with those of blocks that are left out.
    parameters: Parameters
    # Whether there is no other rank.
    is_alone: bool

    @property
    def model(self) -> ClipModel:
        return self.step.model

    @property
    def towers(self) -> tuple[nn.Module, nn.Module]:
        return towers_of(self.step)

    @property
    def trained(self) -> Sequence[bool]:
        """Whether each tower has a second pass. A captioner's pairs are in the place of the image tower."""
        return [*self.step.cache.trained, False][:2]

    @property
    def writes(self) -> bool:
        """Whether both towers and the decoder are one encoder of pairs."""
        return self.step.caption_weight > 0

    @property
    def teachers(self) -> tuple[TeacherFeatures, ...]:
        """The teachers of the distillation."""
        return teachers_of(self.config, self.model)

    @property
    def texts(self) -> int:
        """Captions and hard negatives of a sample."""
        return self.config.data.texts_per_step

    @cached_property
    def caption_share(self) -> float:
        return caption_share(self.model)

    @property
    def inputs(self) -> tuple[Row, Row]:
        """A row of each tower's input."""
        side = self.model.image_size
        length = self.model.context_length
        return Row((3, side, side), torch.uint8), Row((length,), torch.int32)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Of each tower's input."""
        image, text = self.inputs
        return (image.nbytes + text.nbytes, 0) if self.writes else (image.nbytes, text.nbytes)

    @cached_property
    def passes(self) -> Callable[[int, int, bool, bool], ChunkMemory]:
        """`_passes`, each measured once."""
        return cache(self._passes)

    @cached_property
    def loss(self) -> Callable[[int], int]:
        """`_loss`, each measured once."""
        return cache(self._loss)

    def _passes(self, tower: int, size: int, fresh: bool, is_one: bool) -> ChunkMemory:
        """Measure a chunk of `size` rows of the image (0) or the text tower (1). `fresh`: no gradients exist yet.
        `is_one`: it is the only chunk."""
        if tower == 1 and self.writes:
            return ChunkMemory(0)
        meter = self.meters[tower]
        encoder = self.step.cache.encoders[tower]
        rows = self.inputs if self.writes else self.inputs[tower : tower + 1]
        weights = CastWeights()
        if self.memory.casts[tower]:
            weights.start_step(encoder, self.step.precision.autocast, 1 if is_one else 2)

        def encoded() -> list[Tensor]:
            meter.start()
            with self.step.precision.autocast(), weights.used(torch.is_grad_enabled(), False):
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
            p.grad = torch.empty_like(p) if p.requires_grad and not fresh else None
        outputs = encoded()
        graph = meter.live()
        meter.is_backward = True
        with weights.used(True, False):  # checkpointing runs the layers again
            torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
        replay = meter.end()
        operations = meter.operations
        self.step.optimizer.zero_grad()
        return ChunkMemory(encode, graph, replay, encode_operations, operations)

    def _loss(self, batch: int) -> int:
        """Bytes that the loss of `batch` samples of this rank and its gradients take, beyond the features."""
        size = ASSUMED.linear_from
        if batch > 2 * size:
            low = self.loss(size)
            high = self.loss(2 * size)
            return round(high + (batch / size - 2) * (high - low))
        rows = batch, batch * self.texts
        features = [
            torch.empty(size, self.model.width).requires_grad_(trained) for size, trained in zip(rows, self.trained)
        ]
        if self.writes:
            features = [torch.empty(batch, 2, self.model.width).requires_grad_()]
        self.tracker.take_peak()
        before = self.tracker.live
        self.step.cache.loss(
            *features,
            keys=torch.empty(batch, dtype=torch.int64),
            teachers=[torch.empty(batch, *each.shape, dtype=getattr(torch, each.dtype)) for each in self.teachers],
        ).backward()
        self.step.optimizer.zero_grad()
        return self.tracker.take_peak() - before


def build_dry_step(config: TrainConfig, model: ClipModel, machine: DryMachine) -> TrainStep:
    """The step of a run with the model, which is on the meta device. The loss is that of the machine.

    It has no gradient scaler, which takes a few bytes, and whose test of every gradient needs values.
    """
    give_memory(model)
    precision = Precision(DTYPES[config.precision], CPU)
    precision.cast_frozen_(model.image, model.text)
    sizes = ChunkSizes(1, 1, "")
    if isinstance(model.decoder, LeanDecoder):
        model.decoder.takes_wanted = False
    loss = batch_loss(config, model, precision, teachers_of(config, model), machine=machine)
    step = build_step(config, World(0, 1, CPU), model, precision, sizes, loss, sort_captions=False)
    if machine.capability:
        choose_foreach(step.optimizer)
    return step


def give_memory(model: nn.Module) -> None:
    """Tensors of the CPU for those of the meta device. `to_empty` is slow for those without values."""
    new: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            if p not in new:  # else tied
                new[p] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
            module.register_parameter(name, cast(nn.Parameter, new[p]))
        for name, x in [*module.named_buffers(recurse=False)]:
            module.register_buffer(name, new.setdefault(x, torch.empty(x.shape, dtype=x.dtype)))


def teachers_of(config: TrainConfig, model: ClipModel) -> tuple[TeacherFeatures, ...]:
    """Teachers as wide as the model, in float16: their own widths lie beside the shards, which a plan does not read."""
    return tuple(TeacherFeatures(f"{name}.npy", model.width, "float16", 1.0) for name in config.distill.teachers)


def choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let one of torch's optimizers update all tensors of a group at once where it would on CUDA."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def one_of_each(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, int]]:
    """The parameters that a dry update has to include, each with the number of others that are like it.

    Parameters of one shape that are updated one by one take no more memory than one of them.
    """
    alike: dict[Any, list[nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        at_once = group.get("foreach") or group.get("fused")
        for p in group["params"]:
            alike.setdefault(id(p) if at_once else (number, p.shape, p.dtype), []).append(p)
    return [(ones[0], len(ones) - 1) for ones in alike.values()]


def update_memory(step: TrainStep, tracker: MemoryTracker) -> tuple[int, int]:
    """The peak of an update beyond what is live before it, and the bytes of state of the parameters that are left out.

    The peak is that of a second update: the first one makes the optimizer's state.
    """
    updated = one_of_each(step.optimizer)
    for _ in range(2):  # the first makes the state
        tracker.take_peak()
        for p, _others in updated:
            p.grad = torch.empty_like(p)
        step.update(step.gradient_norm())
    peak = tracker.take_peak() - tracker.live
    step.optimizer.zero_grad()
    state = step.optimizer.state
    omitted = sum(
        others * rounded(x.untyped_storage().nbytes())
        for p, others in updated
        for x in state[p].values()
        if isinstance(x, Tensor)
    )
    return peak, omitted


def towers_of(step: TrainStep) -> tuple[nn.Module, nn.Module]:
    """What the passes encode with; of a captioner one encoder of pairs, and nothing."""
    if step.caption_weight > 0:
        return pair_encoder(step.model), nn.Module()
    return step.model.image, step.model.text


def state_memory(step: TrainStep, tracker: MemoryTracker, before: int) -> StateMemory:
    """The memory of a rank that is alone. Makes the optimizer's state.

    `before`: live bytes before the step was built.
    """
    update, omitted = update_memory(step, tracker)
    gradients = [sum(p.nbytes for p in tower.parameters() if p.requires_grad) for tower in towers_of(step)]
    return StateMemory(
        state=tracker.live - before + omitted,
        update=update,
        gradients=gradients,
        summed=gradients,
        at_once=[0, 0],
        casts=[cast_bytes(tower, step.precision) for tower in towers_of(step)],
        gathered=[GatheredWeights(), GatheredWeights()],
    )


def cast_bytes(tower: nn.Module, precision: Precision) -> int:
    """Of the weights that a step of several chunks casts once."""
    weights = CastWeights()
    weights.start_step(tower, precision.autocast, 2)
    return sum(cast.weight.nbytes + (0 if cast.bias is None else cast.bias.nbytes) for _, cast in weights.layers)


def divided(memory: StateMemory, step: TrainStep, ranks: int, parallel: str) -> StateMemory:
    """State and gradients divided among ranks. Casts weights that FSDP2 would gather to the types in which it does.

    DDP's buckets are as large as all gradients; the summed ones are views of them.
    """
    if parallel == "ddp":
        return replace(memory, state=memory.state + sum(memory.gradients), summed=[0, 0])
    dtype = step.precision.dtype
    undivided = 0
    gathered = [GatheredWeights(), GatheredWeights()]
    for i, tower in enumerate(towers_of(step)):
        if any(p.requires_grad for p in tower.parameters()):
            gathered[i] = GatheredWeights.of(tower, parallel, dtype)
            fsdp.cast_gathered_(tower, dtype)
        else:
            undivided += sum(p.nbytes for p in tower.parameters())
    share = [size // ranks for size in memory.gradients]
    return StateMemory(
        state=undivided + (memory.state - undivided) // ranks,
        update=memory.update // ranks,
        gradients=share,
        summed=share,
        at_once=share,
        casts=[0, 0],
        gathered=gathered,
    )


def caption_share(model: ClipModel) -> float:
    """Share of the context's tokens that the text tower computes for an average caption: 1, or less if captions are
    sorted."""
    encoder = model.text.encoder
    trimmed = family_of(encoder).ignores_padding(encoder)
    return min(1.0, round(ASSUMED.caption_tokens + WIDTH_MULTIPLE / 2) / model.context_length) if trimmed else 1.0


@contextmanager
def dry_run(config: TrainConfig, ranks: int, capability: int | None, nodes: int = 1) -> Iterator[DryRun]:
    """A dry run on one of `ranks` GPUs of a compute capability, or (None) in one of `ranks` CPU processes. Raises
    UserError."""
    with torch.device("meta"):
        model = build_model(without_weights(config.model))
    exchange = config.loss.exchange
    ranks_of_node = ranks // nodes
    if exchange == "auto":  # as for the whole batch, not for the parts of it that are run
        itemsize = 4 if config.precision == "fp32" else 2
        texts = config.batch * config.data.texts_per_step
        exchange = auto_exchange(nodes, texts * model.width, itemsize, capability is not None)
        config = replace(config, loss=replace(config.loss, exchange=exchange))
    ring_ranks = {"ring": MAX_RING_RANKS, "nodes": 2 * ranks_of_node}.get(exchange, ranks)
    image, text = (trained_of(tower.encoder) for tower in (model.image, model.text))
    flops = image_flops(config.model, image), text_flops(config.model, text)
    decoder = PassFlops(0, 0)
    if model.decoder is not None and config.caption.weight:
        decoder = decoder_flops(config.model, trained_of(model.decoder))
    with without_memory() as tracker, cuda_autocast() if capability else nullcontext():
        before = tracker.live
        step = build_dry_step(config, model, DryMachine(capability, min(ranks, ring_ranks), ranks_of_node))
        parameters = Parameters.of(model)
        memory = state_memory(step, tracker, before)
        if ranks > 1:
            memory = divided(memory, step, ranks, config.launch.parallel)
        meters = [leave_blocks_out(tower, tracker) for tower in towers_of(step)]
        yield DryRun(config, tracker, step, flops, decoder, memory, meters, parameters, is_alone=ranks == 1)
