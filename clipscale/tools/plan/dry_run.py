"""Runs the trainer's own optimizer step on tensors without memory, as one of P ranks, and records the memory it takes.

b: samples of one rank, c: samples of a chunk, P: ranks, D: feature width. All sizes in bytes.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives for tensors without memory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from clipscale.config.sections import ModelConfig
from clipscale.config.train import TrainConfig
from clipscale.data.columns import columns_of
from clipscale.data.features import TeacherFeatures
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import World
from clipscale.loss.objectives import exchange_of
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import without_weights
from clipscale.state.train_state import Parts, TrainState
from clipscale.step.captions import CaptionRule
from clipscale.step.grad_cache import Chunked
from clipscale.step.pass_contexts import gradient_sync
from clipscale.tools.plan.memory_tracker import DryMachine, MemoryTracker, cuda_autocast, without_memory

CPU = torch.device("cpu")
TOWERS = ("image", "text")
PHASES = ("encode", "loss", "replay", "optim")
FEWEST = 2
"""Blocks of the shallowest tower: the first, and the last, whose forward pass may be shorter."""
LAPS = 4
"""Most ranks of the loss's ring: further visits take no more memory."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of one device in a step."""

    before: dict[str, float]  # live bytes at the start of each phase
    peak: dict[str, float]  # of each stage: "encode", "encode image", "loss", ... A frozen tower has no "replay"
    kept: tuple[int, int] = (0, 0)  # image and text chunks whose graphs are kept

    def phase(self, name: str) -> float:
        """Peak of a phase."""
        return max(size for stage, size in self.peak.items() if stage.split()[0] == name)

    @property
    def highest(self) -> float:
        return max(self.peak.values())

    def moved(self, start: "StepMemory", end: "StepMemory", times: float) -> "StepMemory":
        """This memory further along the line from `start` to `end`, by so many times their distance."""

        def along(sizes: dict[str, float], first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
            return {name: size + round(times * (second[name] - first[name])) for name, size in sizes.items()}

        return replace(
            self, before=along(self.before, start.before, end.before), peak=along(self.peak, start.peak, end.peak)
        )


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
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.module = tower
        self.views = {p: torch.empty_like(p, requires_grad=False) for p in tower.parameters() if p.requires_grad}
        self.syncing = True
        for p in self.views:
            p.register_post_accumulate_grad_hook(self.use_bucket)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.syncing = last
        yield

    def use_bucket(self, p: Tensor) -> None:
        if self.syncing:
            p.grad = self.views[p]  # type: ignore[index]


class DryRun:
    """Runs steps of a training configuration without memory."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: int,
        tracker: MemoryTracker,
        machine: DryMachine,
        model: ClipModel,
    ) -> None:
        """`model`: on the meta device; it gets tensors of the dry run."""
        before = tracker.live
        model.to_empty(device=CPU)
        self.config, self.ranks, self.tracker = config, ranks, tracker
        self.captions = config.data.texts_per_step
        self.memory = StepMemory({}, {})
        """Of the step that runs."""
        self.stage = ""
        self.others = 0
        """Live bytes of other dry runs, which this one does not count."""
        world = DryRunWorld(0, ranks, CPU)
        self.state = TrainState(config, world, parts(config, model, world, machine))
        if machine.capability and type(self.state.optimizer).__module__.startswith("torch.optim"):
            for group in self.state.optimizer.param_groups:  # torch's own choice on CUDA
                group["foreach"] = True if group.get("foreach", False) is None else group.get("foreach", False)
        self.state.precision.scaler = None  # it takes a few bytes, and its test of every gradient needs values
        self.width, self.context_length = model.width, model.context_length
        self.columns = columns_of(config.data, model.image_size, self.state.teachers)
        self.row = self.columns.images.shape
        for p in self.state.trained:  # the optimizer makes its state in the first update
            p.grad = torch.empty_like(p)
        self.state.update(self.state.gradient_norm())
        self.state.optimizer.zero_grad()
        if config.launch.parallel != "ddp" and ranks > 1:
            self.step((1, 1), 1, resident=False)  # FSDP2 allocates in its first step
        self.static = tracker.live - before

    def inputs(self, tower: int, rows: int, resident: bool) -> Chunked:
        """So many inputs of the image (0) or the text tower (1)."""
        return self.state.past_trunk(TOWERS[tower], StagedRows(self, tower, rows, resident))

    def step(self, chunks: tuple[int, int], batch: int, *, resident: bool) -> StepMemory:
        """One optimizer step over `batch` samples of this rank, with chunks of the given sizes for the two towers.

        Without the loss, of which it has the gradients; see `loss`.

        `resident`: chunks stay on the device between the passes (offload=none).
        """
        state = self.state
        towers = state.cache.towers
        self.memory = StepMemory({}, {})
        self.others = self.tracker.live - getattr(self, "static", self.tracker.live)
        for tower, size in zip(towers, chunks):
            tower.size = size
        self.enter("encode")
        texts = batch * self.captions
        features = state.cache.encode(self.inputs(0, batch, resident), self.inputs(1, texts, resident))
        self.enter("loss")
        for tower, rows in zip(towers, features):
            rows.grad = torch.empty_like(rows) if tower.trained else None
        del features, rows
        self.enter("replay")
        state.cache.replay()
        self.enter("optim norm")
        norm = state.gradient_norm()
        gradients = {p: p.grad for p in state.trained}
        # One group of parameters after the other, so that each one's peak is a straight line in the depth.
        for i, group in enumerate(state.optimizer.param_groups):
            for p in gradients:
                p.grad = None
            for p in group["params"]:
                p.grad = gradients[p]
            self.enter(f"optim group {i}")
            state.update(norm)
        self.enter("")
        state.optimizer.zero_grad()
        return self.memory

    def enter(self, stage: str) -> None:
        """A stage of the step begins: a phase, or a tower's part of it. Empty: the step ends."""
        peak = self.tracker.take_peak() - self.others
        if self.stage:
            self.memory.peak[self.stage] = max(peak, self.memory.peak.get(self.stage, 0))
        phase = stage.partition(" ")[0]
        if phase:
            self.memory.before.setdefault(phase, self.tracker.live - self.others)
        self.stage = stage

    def targets(self, batch: int) -> dict[str, Tensor]:
        """What the loss takes beside the features."""
        return {
            column.name: torch.empty(batch, *column.shape, dtype=getattr(torch, column.dtype))
            for column in self.columns.beside
            if column.for_loss
        }

    def loss(self, batch: int) -> int:
        """Bytes that the loss of `batch` samples of this rank and its gradients take, beyond the features."""
        towers, rows = self.state.cache.towers, (batch, batch * self.captions)
        features = [torch.empty(n, self.width).requires_grad_(t.trained) for n, t in zip(rows, towers)]
        self.tracker.take_peak()
        before = self.tracker.live
        self.state.loss(*features, targets=self.targets(batch)).backward()
        self.state.optimizer.zero_grad()
        return self.tracker.take_peak() - before

    def graph(self, tower: int, size: int) -> int:
        """Bytes of the graph of one chunk of a tower; 0 where it has no second pass."""
        cached = self.state.cache.towers[tower]
        if not cached.trained:
            return 0
        rows = self.inputs(tower, size, resident=False).chunk(0, size)
        before = self.tracker.live
        with gradient_sync(cached.encoder, False), cached.autocast():
            out = cached.encoder(rows)
            held = self.tracker.live - before
        del out
        return held


class StagedRows(ChunkLoader):
    """A tower's rows, made on demand. Asking for them begins that tower's stage of a step."""

    def __init__(self, run: DryRun, tower: int, rows: int, resident: bool) -> None:
        shape, dtype = (run.row, torch.uint8) if tower == 0 else ((run.context_length,), torch.int32)

        def read(start: int, stop: int) -> Tensor:
            return torch.empty(stop - start, *shape, dtype=dtype)

        super().__init__(read, rows, CPU, resident=resident)
        self.run, self.tower = run, TOWERS[tower]

    def chunk(self, start: int, stop: int) -> Tensor:
        if self.run.stage:
            self.run.enter(f"{self.run.stage.split()[0]} {self.tower}")
        return super().chunk(start, stop)


class DeepDryRun:
    """A dry run of a model whose blocks are alike: of its first, its last and one in the middle.

    Memory is a straight line in a tower's depth. So up to three shallow models are run: with FEWEST blocks in both
    towers, and with one more in either. Towers that train in part keep their depth.
    """

    def __init__(
        self, config: TrainConfig, model: ClipModel, ranks: int, tracker: MemoryTracker, machine: DryMachine
    ) -> None:
        """`model`: of the settings, on the meta device; it loses blocks."""
        fewest = FEWEST
        if config.launch.parallel != "ddp":
            fewest += 1  # FSDP2 gathers one block ahead
        self.missing: dict[str, int] = {}
        """Blocks of each tower that the base lacks; only of deep towers that train whole or not at all."""
        for tower in TOWERS:
            depth = len(alike_blocks(getattr(model, tower)))
            if depth > fewest + 1 and getattr(config.model, tower).train in ("all", "none"):
                self.missing[tower] = depth - fewest
        for tower in self.missing:
            shorten(getattr(model, tower), fewest + 1)

        def run(deep: str) -> DryRun:
            """With the fewest blocks in each deep tower, and one more in the tower `deep`."""
            with _disable_current_modes():
                copied = copy.deepcopy(model)
            for tower in self.missing:
                if tower != deep:
                    shorten(getattr(copied, tower), fewest)
            return DryRun(config, ranks, tracker, machine, copied)

        self.base = run("")
        self.base_step = cache(self.base.step)
        self.deeper = {tower: run(tower) for tower in self.missing}

    def step(self, chunks: tuple[int, int], batch: int, *, resident: bool) -> StepMemory:
        """As `DryRun.step`."""
        base = self.base_step(chunks, batch, resident=resident)
        memory = base
        for tower, run in self.deeper.items():
            memory = memory.moved(base, run.step(chunks, batch, resident=resident), self.missing[tower])
        return memory

    def graph(self, tower: int, size: int) -> int:
        """As `DryRun.graph`."""
        return self.extrapolated(lambda run: run.graph(tower, size))

    @property
    def static(self) -> int:
        """As `DryRun.static`."""
        return self.extrapolated(lambda run: run.static)

    def extrapolated(self, measure: Callable[[DryRun], int]) -> int:
        """What `measure` would say of the whole model: it is a straight line in a tower's depth."""
        base = measure(self.base)
        return base + sum(self.missing[tower] * (measure(run) - base) for tower, run in self.deeper.items())


def alike_blocks(tower: nn.Module) -> nn.ModuleList | nn.Sequential:
    """A tower's longest list of blocks of one kind, with parameters of equal shapes."""

    def kind(block: nn.Module) -> tuple[Any, ...]:
        return type(block), *(p.shape for p in block.parameters())

    stacks = [module for module in tower.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    alike = [stack for stack in stacks if len(set(map(kind, stack))) == 1]
    return max(alike, key=len, default=nn.ModuleList())


def shorten(tower: nn.Module, blocks: int) -> None:
    """Leave so many of a tower's alike blocks: the first ones, and the last."""
    stack = alike_blocks(tower)
    del stack[blocks - 1 : len(stack) - 1]


def model_without_values(config: ModelConfig) -> ClipModel:
    """The model of these settings on the meta device."""
    with torch.device("meta"):
        return build_model(without_weights(config))


def parts(config: TrainConfig, model: ClipModel, world: World, machine: DryMachine) -> Parts:
    """Of a run that reads nothing. Chunk sizes are set before each step."""
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
    return Parts(
        model,
        CaptionRule(config, world, model, sort=False),  # chunks of sorted captions hold as many tokens
        teachers=tuple(TeacherFeatures(name, model.width, "float16") for name in config.distill.teachers),
        chunks={"image": 1, "text": 1},
        machine=machine,
        loss_group=loss_group,
    )


@contextmanager
def dry_run(
    config: TrainConfig, model: ClipModel, ranks: int, capability: int | None, nodes: int = 1
) -> Iterator[DeepDryRun]:
    """A dry run on one of `ranks` GPUs of a compute capability, or (None) in one of `ranks` CPU processes.

    `model`: by `model_without_values`.
    """
    if config.loss.exchange == "auto":  # as for the whole batch, not for the parts of it that are run
        itemsize = 4 if config.precision == "fp32" else 2
        texts = config.batch * config.data.texts_per_step
        exchange = exchange_of(nodes, texts, model.width, itemsize)
        config = replace(config, loss=replace(config.loss, exchange=exchange))
    with ExitStack() as stack:
        if ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        tracker = stack.enter_context(without_memory())
        if capability:
            stack.enter_context(cuda_autocast())
        yield DeepDryRun(config, model, ranks, tracker, DryMachine(capability, ranks // nodes))
