"""Runs the trainer's own passes, loss and update on tensors without memory, and measures the memory that they take.

The blocks of a tower are alike, so two of them are run: what the first one adds counts for all that are left out.

b: samples of one rank, P: ranks, D: feature width. All sizes in bytes.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.config.train import TrainConfig
from clipscale.data.loader.captions import GRAIN
from clipscale.distributed import fsdp
from clipscale.distributed.world import World
from clipscale.loss.objective import exchange_of
from clipscale.models.families import family_of
from clipscale.models.flops import PassFlops, image_flops, text_flops, trained_of
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import without_weights
from clipscale.start.build import build_step
from clipscale.step.chunk_sizes import ChunkSizes
from clipscale.step.precision import Precision
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.memory_tracker import DryMachine, MemoryTracker, cuda_autocast, without_memory

CPU = torch.device("cpu")
# How many of the identical blocks are run.
BLOCKS = 2
# Most ranks in the ring of the loss: more hops take no more memory.
LAPS = 4


@dataclass(frozen=True)
class ChunkMemory:
    """Memory of one chunk of a tower, beyond what is live before it."""

    # Peak of the first pass, without a graph.
    encode: float
    # Bytes of the graph; 0 for a frozen tower.
    graph: float = 0
    # Peak of the second pass.
    replay: float = 0


@dataclass(frozen=True)
class GatheredWeights:
    """Weights of a tower that FSDP2 has gathered, in the type in which it gathers them."""

    # Held from the first chunk to the last.
    held: int = 0
    # More in the first pass.
    encode: int = 0
    # More in the second pass, with gradients that are not yet summed.
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


class Meter:
    """Peak and growth of the memory of a pass, as if blocks that are left out ran too."""

    def __init__(self, tracker: MemoryTracker, tower: nn.Module) -> None:
        """Leaves blocks of the tower out."""
        self.tracker = tracker
        blocks, alike = repeated_blocks(tower)
        self.left_out = len(alike[BLOCKS:])
        for i, starts in zip(alike[:BLOCKS], (True, False)):
            blocks[i].register_forward_pre_hook(partial(self._enter, starts))
        for i in reversed(alike[BLOCKS:]):
            del blocks[i]

    def start(self) -> None:
        self.base = self.tracker.live
        self.peak = 0.0
        self.added = 0.0
        self.entered: int | None = None
        self.is_backward = False
        self.tracker.take_peak()

    def left(self) -> float:
        """Bytes of the pass that are still live."""
        return self.tracker.live - self.base + self.added

    def end(self) -> float:
        """The peak."""
        self._mark(False)
        return self.peak

    def _enter(self, starts: bool, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A pass enters the first (`starts`) or the second block. The backward pass visits them in reverse order."""
        if self.is_backward:  # checkpointing runs them again
            return
        self._mark(starts)
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._mark(not starts))

    def _mark(self, starts: bool) -> None:
        """The first block begins (`starts`) or ends, forward or backward."""
        peak = self.tracker.take_peak() - self.base
        self.peak = max(self.peak, peak + self.added)
        if self.entered is not None:  # as often as blocks are left out
            self.added += self.left_out * (self.tracker.live - self.entered)
            self.peak = max(self.peak, peak + self.added)
        self.entered = self.tracker.live if starts else None


class DryRun:
    """One rank of a run, with tensors of the tracker."""

    def __init__(
        self,
        config: TrainConfig,
        tracker: MemoryTracker,
        machine: DryMachine,
        ranks: int,
        model: ClipModel,
        flops: tuple[PassFlops, PassFlops],
    ) -> None:
        """`model`: on the meta device. `flops`: of a picture and of a caption as long as the context."""
        self.config = config
        self.tracker = tracker
        self.flops = flops
        self.model = model
        self.caption_share = caption_share(model)
        # Captions and hard negatives of a sample.
        self.texts = config.data.texts_per_step
        # Shape and type of a row of each tower.
        self.inputs = ((3, model.image_size, model.image_size), torch.uint8), ((model.context_length,), torch.int32)
        # Its bytes.
        self.row = [math.prod(shape) * dtype.itemsize for shape, dtype in self.inputs]
        self.towers = model.image, model.text
        self.passes = cache(self._passes)
        self.loss = cache(self._loss)
        before = tracker.live
        model.to_empty(device=CPU)
        precision = Precision(config.precision, CPU)
        precision.cast_frozen_(*self.towers)
        self.step = build_step(
            config, World(0, 1, CPU), model, precision, ChunkSizes(1, 1, ""), sort_captions=False, machine=machine
        )
        self.step.precision.scaler = None  # it takes a few bytes, and its test of every gradient needs values
        # Whether each tower has a second pass.
        self.trained = self.step.cache.trained
        # The largest group last: then its update finds the state of all, as in each later step.
        groups = self.step.optimizer.param_groups
        groups.sort(key=lambda group: sum(p.nbytes for p in group["params"]))
        if machine.capability and type(self.step.optimizer).__module__.startswith("torch.optim"):
            for group in groups:  # torch's own choice on CUDA
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
        # The first update makes the optimizer's state: with `foreach` that of a group before its arithmetic.
        for _ in range(1 if groups[0].get("foreach") else 2):
            tracker.take_peak()
            for p in self.step.trainable_parameters:
                p.grad = torch.empty_like(p)
            self.step.update(self.step.gradient_norm())
        # Peak of an update beyond what is live before it.
        self.update = tracker.take_peak() - tracker.live
        self.step.optimizer.zero_grad()
        # Bytes between steps.
        self.state = tracker.live - before
        # Gradient bytes of each tower, while its chunks add to them.
        self.gradients = [sum(p.nbytes for p in tower.parameters() if p.requires_grad) for tower in self.towers]
        # Gradient bytes of each tower after its last chunk. DDP: 0, as they are views of the buckets.
        self.summed = self.gradients
        # Gradient bytes to add to the replay of each tower if it has only one chunk.
        self.at_once = [0, 0]
        self.whole = [GatheredWeights(), GatheredWeights()]
        self.is_alone = ranks == 1
        if ranks > 1:
            self._divide(ranks)
        self.meters = [Meter(tracker, tower) for tower in self.towers]

    def _divide(self, ranks: int) -> None:
        """Divide state and gradients among ranks. DDP's buckets are as large as all gradients; the summed ones are
        views of them."""
        parallel = self.config.launch.parallel
        dtype = self.step.precision.dtype
        if parallel == "ddp":
            self.state += sum(self.gradients)
            self.summed = [0, 0]
            return
        undivided = 0
        for i, tower in enumerate(self.towers):
            if not self.trained[i]:
                undivided += sum(p.nbytes for p in tower.parameters())
                continue
            self.whole[i] = GatheredWeights.of(tower, parallel, dtype)
            fsdp.cast_gathered_(tower, dtype)
        self.state = undivided + (self.state - undivided) // ranks
        self.update //= ranks
        self.gradients = self.summed = self.at_once = [size // ranks for size in self.gradients]

    def _passes(self, tower: int, size: int, fresh: bool) -> ChunkMemory:
        """Measure a chunk of `size` rows of the image (0) or the text tower (1). `fresh`: no gradients exist yet."""
        meter = self.meters[tower]
        encoder = self.step.cache.encoders[tower]
        shape, dtype = self.inputs[tower]

        def encoded() -> Tensor:
            meter.start()
            with self.step.precision.autocast():
                return encoder(torch.empty(size, *shape, dtype=dtype))

        with torch.no_grad():
            encoded()
        encode = meter.end()
        if not self.trained[tower]:
            return ChunkMemory(encode)
        for p in self.towers[tower].parameters():
            p.grad = torch.empty_like(p) if p.requires_grad and not fresh else None
        out = encoded()
        graph = meter.left()
        meter.is_backward = True
        out.backward(torch.empty_like(out))
        replay = meter.end()
        self.step.optimizer.zero_grad()
        return ChunkMemory(encode, graph, replay)

    def _loss(self, batch: int) -> int:
        """Bytes that the loss of `batch` samples of this rank and its gradients take, beyond the features."""
        size = ASSUMED.linear_from
        if batch > 2 * size:
            low = self.loss(size)
            high = self.loss(2 * size)
            return round(high + (batch / size - 2) * (high - low))
        rows = batch, batch * self.texts
        features = [torch.empty(n, self.model.width).requires_grad_(trained) for n, trained in zip(rows, self.trained)]
        self.tracker.take_peak()
        before = self.tracker.live
        self.step.cache.loss(*features, keys=torch.empty(batch, dtype=torch.int64)).backward()
        self.step.optimizer.zero_grad()
        return self.tracker.take_peak() - before


def caption_share(model: ClipModel) -> float:
    """Share of the context's tokens that the text tower computes for an average caption: 1, or less if captions are
    sorted."""
    encoder = model.text.encoder
    trimmed = family_of(encoder).ignores_padding(encoder)
    return min(1.0, round(ASSUMED.caption_tokens + GRAIN / 2) / model.context_length) if trimmed else 1.0


def repeated_blocks(tower: nn.Module) -> tuple[Any, list[int]]:
    """The list of blocks with the longest run of identical consecutive blocks, and their indices.

    The last block is left out: it may compute less.
    """
    best: tuple[Any, list[int]] = [], []
    for blocks in tower.modules():
        if isinstance(blocks, nn.ModuleList | nn.Sequential):
            looks = [
                [type(block), [(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]]
                for block in blocks
            ]
            for _, alike in groupby(range(len(looks) - 1), looks.__getitem__):
                best = max(best, (blocks, list(alike)), key=lambda found: len(found[1]))
    return best


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
        exchange = exchange_of(nodes, texts * model.width, itemsize, capability is not None)
        config = replace(config, loss=replace(config.loss, exchange=exchange))
    laps = {"ring": LAPS, "nodes": 2 * ranks_of_node}.get(exchange, ranks)
    image, text = (trained_of(tower.encoder) for tower in (model.image, model.text))
    flops = image_flops(config.model, image), text_flops(config.model, text)
    with without_memory() as tracker, cuda_autocast() if capability else nullcontext():
        yield DryRun(config, tracker, DryMachine(capability, min(ranks, laps), ranks_of_node), ranks, model, flops)
