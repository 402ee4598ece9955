"""Runs the trainer's own optimizer step on tensors without memory, as one of P ranks, and records the memory it takes.

The blocks of a tower are alike, so only a few of them are run. Parts of a step are separated at their boundaries: at
every moment within one part, each block more adds the same memory (memory.py counts them all).

b: samples of one rank, c: samples of a chunk, P: ranks, D: feature width. All sizes in bytes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives for tensors without memory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipscale.config.sections import ModelConfig
from clipscale.config.train import TrainConfig
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import World
from clipscale.loss.objective import exchange_of
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import without_weights
from clipscale.state.train_state import build_state
from clipscale.step.batch_loss import BatchLoss
from clipscale.step.chunk_sizes import ChunkSizes
from clipscale.step.grad_cache import Chunked
from clipscale.step.pass_contexts import gradient_sync
from clipscale.step.precision import Precision
from clipscale.step.train_step import TrainStep
from clipscale.tools.plan.memory_tracker import DryMachine, MemoryTracker, cuda_autocast, without_memory

CPU = torch.device("cpu")
TOWERS = ("image", "text")
LAPS = 4
"""Most ranks of the loss's ring: further visits take no more memory."""
Bytes = dict[str, float]
"""By what takes them: the peak of each part of a step, such as `replay image backward first`, and `before encode`, what
is live when a phase begins."""


class DryRunWorld(World):
    """One rank of `size`; the others are assumed to hold the same values."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, value: Any) -> Any:
        return value

    def highest(self, *values: int) -> list[int]:
        return list(values)

    def mesh(self) -> DeviceMesh:
        with unset_fake_temporarily():  # the mesh needs a table of ranks with real values
            return super().mesh()

    def wrap(self, tower: nn.Module, parallel: str = "ddp", *args: Any, **kwargs: Any) -> nn.Module:
        trained = any(p.requires_grad for p in tower.parameters())
        if self.size > 1 and trained and parallel == "ddp":
            return DdpBuckets(tower)
        return super().wrap(tower, parallel, *args, **kwargs)


class DdpBuckets(nn.Module):
    """Takes memory like DDP, whose C++ reducer needs tensors with values: buckets as large as all gradients exist from
    the start; gradients are separate tensors until the backward pass that synchronises makes them views of the buckets.

    All at its end, where there are chunks before: then that pass takes what those take, and a step of two chunks is
    like one of many.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.module = tower
        self.views = {p: torch.empty_like(p, requires_grad=False) for p in tower.parameters() if p.requires_grad}
        self.at_once = False
        for p in self.views:
            p.register_post_accumulate_grad_hook(self.use_bucket)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.at_once = last and all(p.grad is None for p in self.views)
        yield
        for p in self.views if last else ():
            if p.grad is not None:
                p.grad = self.views[p]

    def use_bucket(self, p: Tensor) -> None:
        if self.at_once:
            p.grad = self.views[p]  # type: ignore[index]


class DryRun:
    """Runs steps of a training configuration without memory, with some of the blocks of its model."""

    def __init__(
        self, config: TrainConfig, world: World, tracker: MemoryTracker, machine: DryMachine, short: "ShortModel"
    ) -> None:
        """`short`: its model gets tensors of the dry run."""
        self.config, self.tracker = config, tracker
        self.others = tracker.live
        """Of other dry runs."""
        self.static = 0
        """Of the model and the optimizer's state."""
        self.captions = config.data.texts_per_step
        self.bytes: Bytes = {}
        """Of the step that runs."""
        self.phase = self.tower = ""
        self.parts: list[str] = []
        """Those in which the step is: a block may be the first and the last of those that are alike."""
        self.is_backward = False
        model = short.model
        for blocks in short.alike:
            self.watch(blocks)
        model.to_empty(device=CPU)
        self.train_step = train_step_of(config, model, world, machine)
        if machine.capability and type(self.train_step.optimizer).__module__.startswith("torch.optim"):
            for group in self.train_step.optimizer.param_groups:  # torch's own choice on CUDA
                if group.get("foreach", False) is None:
                    group["foreach"] = True
        self.train_step.precision.scaler = None  # it takes a few bytes, and its test of every gradient needs values
        self.width, self.context_length, self.side = model.width, model.context_length, model.image_size
        for p in self.train_step.trained:  # the optimizer makes its state in the first update
            p.grad = torch.empty_like(p)
        self.train_step.update(self.train_step.gradient_norm())
        self.train_step.optimizer.zero_grad()
        if config.launch.parallel != "ddp" and world.size > 1:
            self.step((1, 1), 1, resident=False)  # FSDP2 allocates in its first step
        self.static = tracker.live - self.others

    def watch(self, blocks: list[nn.Module]) -> None:
        """Note where a pass enters and leaves each of these blocks, which follow each other."""
        count = len(blocks)
        names = {-1: ["before"], count: ["after"]} | {i: [] for i in range(count)}
        if count:
            names[0].append("first")
            names[count - 1].append("last")

        def boundary(x: Any, i: int) -> None:
            """Between block i - 1 and i."""
            if not self.is_backward:  # else checkpointing runs them again
                self.enter([f"forward {name}" for name in names[i]])
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(lambda gradient: self.go_backward(names[i - 1]))

        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda block, inputs, i=i: boundary(inputs[0] if inputs else None, i))
        for block in blocks[-1:]:
            block.register_forward_hook(
                lambda block, inputs, out: boundary(out[0] if isinstance(out, tuple) else out, count)
            )

    def go_backward(self, names: list[str]) -> None:
        self.is_backward = True
        self.enter([f"backward {name}" for name in names])

    def enter(self, names: list[str]) -> None:
        """Parts of the tower's pass begin."""
        self.note_peak()
        self.parts = [f"{self.phase} {self.tower} {name}" for name in names if self.phase]

    def note_peak(self) -> None:
        """What runs has ended."""
        peak = self.tracker.take_peak() - self.others
        for part in self.parts:
            self.bytes[part] = max(peak, self.bytes.get(part, 0))

    def begin(self, phase: str) -> None:
        """A phase begins; empty: the step ends."""
        self.note_peak()
        self.phase = phase
        self.parts = [phase] if phase else []
        if phase:
            self.bytes[f"before {phase}"] = self.tracker.live - self.others

    def inputs(self, tower: int, rows: int, resident: bool) -> Chunked:
        """So many inputs of the image (0) or the text tower (1)."""
        return StagedRows(self, tower, rows, resident)

    def step(self, chunks: tuple[int, int], batch: int, *, resident: bool) -> Bytes:
        """One optimizer step over `batch` samples of this rank, with chunks of the given sizes for the two towers.

        Without the loss, of which it has the gradients; see `loss`.

        `resident`: chunks stay on the device between the passes (offload=none).
        """
        step, cache = self.train_step, self.train_step.cache
        self.bytes = {}
        self.others = self.tracker.live - self.static
        cache.chunks = [*chunks]
        self.begin("encode")
        texts = batch * self.captions
        features = cache.encode(self.inputs(0, batch, resident), self.inputs(1, texts, resident))
        self.begin("loss")
        for rows in features:
            rows.grad = torch.empty_like(rows) if rows.requires_grad else None
        del features, rows
        self.begin("replay")
        cache.replay()
        self.begin("optim")
        norm = step.gradient_norm()
        self.tracker.history.clear()
        step.update(norm)
        self.begin("")
        sizes = self.tracker.history  # the same operations at any depth, where they take all parameters at once
        self.bytes |= {f"optim {len(sizes)} {i}": size - self.others for i, size in enumerate(sizes)}
        step.optimizer.zero_grad()
        return self.bytes.copy()

    def loss(self, batch: int) -> int:
        """Bytes that the loss of `batch` samples of this rank and its gradients take, beyond the features."""
        cache, rows = self.train_step.cache, (batch, batch * self.captions)
        features = [torch.empty(n, self.width).requires_grad_(trained) for n, trained in zip(rows, cache.trained)]
        self.tracker.take_peak()
        before = self.tracker.live
        cache.loss(*features, keys=torch.empty(batch, dtype=torch.int64)).backward()
        self.train_step.optimizer.zero_grad()
        return self.tracker.take_peak() - before

    def graph(self, tower: int, size: int) -> int:
        """Bytes of the graph of one chunk of a tower; 0 where it has no second pass."""
        cache = self.train_step.cache
        if not cache.trained[tower]:
            return 0
        rows = self.inputs(tower, size, resident=False).chunk(0, size)
        before = self.tracker.live
        encoder = cache.encoders[tower]
        with gradient_sync(encoder, False), self.train_step.precision.autocast():
            out = encoder(rows)
            held = self.tracker.live - before
        del out
        return held


class StagedRows(ChunkLoader):
    """A tower's rows, made on demand. Asking for them begins a pass of that tower."""

    def __init__(self, run: DryRun, tower: int, rows: int, resident: bool) -> None:
        shape = (run.context_length,) if tower else (3, run.side, run.side)
        dtype = torch.int32 if tower else torch.uint8

        def read(start: int, stop: int) -> Tensor:
            return torch.empty(stop - start, *shape, dtype=dtype)

        super().__init__(read, rows, CPU, resident=resident)
        self.run, self.tower = run, TOWERS[tower]

    def chunk(self, start: int, stop: int) -> Tensor:
        self.run.tower, self.run.is_backward = self.tower, False
        self.run.enter(["forward before"])
        return super().chunk(start, stop)


def model_without_values(config: ModelConfig) -> ClipModel:
    """The model of these settings on the meta device."""
    with torch.device("meta"):
        return build_model(without_weights(config))


class ShortModel:
    """A model with some of its blocks."""

    def __init__(self, config: ModelConfig, *numbers: int) -> None:
        """`numbers`: of those blocks of the image and of the text tower that are alike, how many remain."""
        self.model = model_without_values(config)
        self.alike: list[list[nn.Module]] = []
        """Those of each tower that remain."""
        self.left_out: list[int] = []
        """Blocks of each tower that do not."""
        for tower, number in zip((self.model.image, self.model.text), numbers):
            blocks, alike = repeated_blocks(tower.encoder)
            self.alike.append([blocks[i] for i in alike[:number]])
            self.left_out.append(len(alike[number:]))
            for i in reversed(alike[number:]):
                del blocks[i]


def repeated_blocks(encoder: nn.Module) -> tuple[Any, list[int]]:
    """The list of blocks in which most that follow each other are alike, and the numbers of these.

    Not of its last one, which may compute less.
    """

    def look(block: nn.Module) -> Any:
        return type(block), [(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]

    best: tuple[Any, list[int]] = [], []
    for blocks in encoder.modules():
        if isinstance(blocks, nn.ModuleList | nn.Sequential) and len(blocks) > 1:
            looks = [look(block) for block in blocks]
            alike = max((list(same) for _, same in groupby(range(len(blocks) - 1), looks.__getitem__)), key=len)
            if looks[alike[0]][1] and len(alike) > len(best[1]):
                best = blocks, alike
    return best


def train_step_of(config: TrainConfig, model: ClipModel, world: World, machine: DryMachine) -> TrainStep:
    """The step of a run that reads nothing. Chunk sizes are set before each step."""
    for module in model.modules():  # on GPUs batch normalisation is synchronised, which takes as much memory
        if world.size > 1 and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    loss_group = None
    laps = LAPS
    if config.loss.exchange == "nodes":
        laps = 2 * (machine.ranks_of_node or 1)
    if world.size > laps and config.loss.exchange in ("ring", "nodes"):  # further laps take the same memory
        group = dist.new_group(list(range(laps)))
        loss_group = group if isinstance(group, dist.ProcessGroup) else None
    autocast = Precision(config.precision, world.device).autocast
    loss = BatchLoss(config, model, autocast, machine, loss_group)
    # Chunks of sorted captions hold as many tokens.
    return build_state(config, world, model, loss, sorts=False, chunks=ChunkSizes(1, 1, "")).step


@contextmanager
def dry_runs(
    config: TrainConfig, ranks: int, capability: int | None, nodes: int = 1
) -> Iterator[list[tuple[int, DryRun]]]:
    """Dry runs on one of `ranks` GPUs of a compute capability, or (None) in one of `ranks` CPU processes: one with few
    blocks, and those with a block more of a tower of which it leaves some out; each with the number that it stands for.
    """
    sharded = config.launch.parallel != "ddp" and ranks > 1
    few = 1 + sharded  # FSDP2 gathers the weights of a block in the one before
    shorts = [ShortModel(config.model, few + image, few + text) for image, text in ((0, 0), (1, 0), (0, 1))]
    if config.loss.exchange == "auto":  # as for the whole batch, not for the parts of it that are run
        itemsize = 4 if config.precision == "fp32" else 2
        texts = config.batch * config.data.texts_per_step
        exchange = exchange_of(nodes, texts, shorts[0].model.width, itemsize)
        config = replace(config, loss=replace(config.loss, exchange=exchange))
    with ExitStack() as stack:
        if ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        tracker = stack.enter_context(without_memory())
        if capability:
            stack.enter_context(cuda_autocast())
        world, machine = DryRunWorld(0, ranks, CPU), DryMachine(capability, ranks // nodes)
        times = [1, *shorts[0].left_out]
        yield [(n, DryRun(config, world, tracker, machine, short)) for n, short in zip(times, shorts) if n]
