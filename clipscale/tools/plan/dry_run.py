"""Runs the trainer's own optimizer step on tensors without memory, as one of P ranks, and records the memory it takes.

b: samples of one rank, c: samples of a chunk, P: ranks, D: feature width. All sizes in bytes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
from clipscale.data.columns import columns_of
from clipscale.data.features import TeacherFeatures
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
PHASES = ("encode", "loss", "replay", "optim")
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

    def beyond(self, start: "StepMemory", times: float) -> "StepMemory":
        """Further along the line from `start` to this, by so many times their distance."""

        def along(sizes: dict[str, float], first: dict[str, float]) -> dict[str, float]:
            return {name: size + round(times * (size - first[name])) for name, size in sizes.items()}

        return StepMemory(along(self.before, start.before), along(self.peak, start.peak))


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
        model.to_empty(device=CPU)
        self.config, self.ranks, self.tracker = config, ranks, tracker
        self.captions = config.data.texts_per_step
        self.memory = StepMemory({}, {})
        """Of the step that runs."""
        self.stage = ""
        world = DryRunWorld(0, ranks, CPU)
        self.train_step = train_step_of(config, model, world, machine)
        if machine.capability and type(self.train_step.optimizer).__module__.startswith("torch.optim"):
            for group in self.train_step.optimizer.param_groups:  # torch's own choice on CUDA
                if group.get("foreach", False) is None:
                    group["foreach"] = True
        self.train_step.precision.scaler = None  # it takes a few bytes, and its test of every gradient needs values
        self.width, self.context_length = model.width, model.context_length
        self.columns = columns_of(config.data, model.image_size, teachers_of(config, model))
        for p in self.train_step.trained:  # the optimizer makes its state in the first update
            p.grad = torch.empty_like(p)
        self.train_step.update(self.train_step.gradient_norm())
        self.train_step.optimizer.zero_grad()
        if config.launch.parallel != "ddp" and ranks > 1:
            self.step((1, 1), 1, resident=False)  # FSDP2 allocates in its first step
        self.static = tracker.live
        """Bytes of the model and the optimizer's state."""

    def inputs(self, tower: int, rows: int, resident: bool) -> Chunked:
        """So many inputs of the image (0) or the text tower (1)."""
        return self.train_step.past_trunk(TOWERS[tower], StagedRows(self, tower, rows, resident))

    def step(self, chunks: tuple[int, int], batch: int, *, resident: bool) -> StepMemory:
        """One optimizer step over `batch` samples of this rank, with chunks of the given sizes for the two towers.

        Without the loss, of which it has the gradients; see `loss`.

        `resident`: chunks stay on the device between the passes (offload=none).
        """
        step, cache = self.train_step, self.train_step.cache
        self.memory = StepMemory({}, {})
        cache.chunks = [*chunks]
        self.enter("encode")
        texts = batch * self.captions
        features = cache.encode(self.inputs(0, batch, resident), self.inputs(1, texts, resident))
        self.enter("loss")
        for trained, rows in zip(cache.trained, features):
            rows.grad = torch.empty_like(rows) if trained else None
        del features, rows
        self.enter("replay")
        cache.replay()
        self.enter("optim")
        step.update(step.gradient_norm())
        self.enter("")
        step.optimizer.zero_grad()
        return self.memory

    def enter(self, stage: str) -> None:
        """A stage of the step begins: a phase, or a tower's part of it. Empty: the step ends."""
        peak = self.tracker.take_peak()
        if self.stage:
            self.memory.peak[self.stage] = max(peak, self.memory.peak.get(self.stage, 0))
        phase = stage.partition(" ")[0]
        if phase:
            self.memory.before.setdefault(phase, self.tracker.live)
        self.stage = stage

    def loss(self, batch: int) -> int:
        """Bytes that the loss of `batch` samples of this rank and its gradients take, beyond the features."""
        cache, rows = self.train_step.cache, (batch, batch * self.captions)
        features = [torch.empty(n, self.width).requires_grad_(trained) for n, trained in zip(rows, cache.trained)]
        self.tracker.take_peak()
        before = self.tracker.live
        cache.loss(
            *features,
            targets={
                column.name: torch.empty(batch, *column.shape, dtype=getattr(torch, column.dtype))
                for column in self.columns.beside
                if column.for_loss
            },
        ).backward()
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
    """A tower's rows, made on demand. Asking for them begins that tower's stage of a step."""

    def __init__(self, run: DryRun, tower: int, rows: int, resident: bool) -> None:
        shape, dtype = (run.columns.images.shape, torch.uint8) if tower == 0 else ((run.context_length,), torch.int32)

        def read(start: int, stop: int) -> Tensor:
            return torch.empty(stop - start, *shape, dtype=dtype)

        super().__init__(read, rows, CPU, resident=resident)
        self.run, self.tower = run, TOWERS[tower]

    def chunk(self, start: int, stop: int) -> Tensor:
        if self.run.stage:
            self.run.enter(f"{self.run.stage.split()[0]} {self.tower}")
        return super().chunk(start, stop)


def model_without_values(config: ModelConfig) -> ClipModel:
    """The model of these settings on the meta device."""
    with torch.device("meta"):
        return build_model(without_weights(config))


def teachers_of(config: TrainConfig, model: ClipModel) -> tuple[TeacherFeatures, ...]:
    """As wide as the model."""
    return tuple(TeacherFeatures(name, model.width, "float16") for name in config.distill.teachers)


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
    loss = BatchLoss(config, model, autocast, teachers_of(config, model), machine, loss_group)
    # Chunks of sorted captions hold as many tokens.
    return build_state(config, world, model, loss, sorts=False, chunks=ChunkSizes(1, 1, "")).step


@contextmanager
def dry_run(
    config: TrainConfig, model: ClipModel, ranks: int, capability: int | None, nodes: int = 1
) -> Iterator[DryRun]:
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
        yield DryRun(config, ranks, tracker, DryMachine(capability, ranks // nodes), model)
