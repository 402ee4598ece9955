"""Runs the trainer's own optimizer step on tensors without memory, as one of P ranks, and records the memory it takes.

b: samples of one rank, c: samples of a chunk, P: ranks, D: feature width. All sizes in bytes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives for tensors without memory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipscale.config.train import TrainConfig
from clipscale.data.features import StoredFeatures
from clipscale.data.loader.host_batch import Targets
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import World
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import without_weights
from clipscale.state.train_state import TrainState
from clipscale.step.captions import CaptionRule
from clipscale.step.grad_cache import Chunked
from clipscale.step.pass_contexts import gradient_sync
from clipscale.tools.plan.memory_tracker import DryMachine, MemoryTracker, cuda_autocast, without_memory

CPU = torch.device("cpu")
TOWERS = ("image", "text")
PHASES = ("encode", "loss", "replay", "optim")


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


class DryRunState(TrainState):
    """The trainer's state without pretrained weights and data; chunk sizes are set before each step."""

    def build_model(self) -> ClipModel:
        to, nn.Module.to = nn.Module.to, lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
        try:  # peft moves its layers, which takes values
            return build_model(without_weights(self.config.model))
        finally:
            nn.Module.to = to  # type: ignore[method-assign]

    def stored_features(self) -> StoredFeatures | None:
        member = self.config.data.stored_member
        return StoredFeatures(member, (self.model.width,), "float16") if member else None

    def stored_teachers(self) -> tuple[StoredFeatures, ...]:
        return tuple(StoredFeatures(name, (2, self.model.width), "float16") for name in self.config.distill.teachers)

    def caption_rule(self) -> CaptionRule:  # chunks of sorted captions hold as many tokens
        return CaptionRule(self.config, self.world, self.model, sort=False)

    def chunk_sizes(self, earlier: dict[str, Any]) -> dict[str, Any]:
        return {"image": 1, "text": 1}


class DryRun:
    """Runs steps of a training configuration without memory; made by `dry_run`."""

    def __init__(self, config: TrainConfig, ranks: int, tracker: MemoryTracker, capability: int | None) -> None:
        self.config, self.ranks, self.tracker, self.captions = config, ranks, tracker, config.data.captions_per_step
        self.memory, self.stage = StepMemory({}, {}), ""  # of the step that runs
        self.state = DryRunState(config, DryRunWorld(0, ranks, CPU), machine=DryMachine(capability))
        if capability and type(self.state.optimizer).__module__.startswith("torch.optim"):
            for group in self.state.optimizer.param_groups:  # torch's own choice on CUDA
                group["foreach"] = True if group.get("foreach", False) is None else group.get("foreach", False)
        self.state.precision.scaler = None  # it takes a few bytes, and its test of every gradient needs values
        model, stored = self.state.model, self.state.stored
        self.width, self.context_length = model.width, model.context_length
        self.row = stored.shape if stored else (3, model.image_size, model.image_size)
        self.row_type = getattr(torch, stored.dtype if stored else "uint8")
        for p in self.state.trained:  # the optimizer makes its state in the first update
            p.grad = torch.empty_like(p)
        self.state.update(self.state.gradient_norm())
        self.state.optimizer.zero_grad()
        if config.launch.parallel != "ddp" and ranks > 1:
            self.step((1, 1), 1)  # FSDP2 allocates in its first step

    def inputs(self, tower: int, rows: int) -> Chunked:
        """So many inputs of the image (0) or the text tower (1)."""
        return self.state.past_trunk(TOWERS[tower], StagedRows(self, tower, rows))

    def step(self, chunks: tuple[int, int], batch: int) -> StepMemory:
        """One optimizer step over `batch` samples of this rank, with chunks of the given sizes for the two towers."""
        state, cache = self.state, self.state.cache
        self.memory = StepMemory({}, {})
        for tower, size in zip(cache.towers, chunks):
            tower.size = size
        self.enter("encode")
        features = cache.encode(self.inputs(0, batch), self.inputs(1, batch * self.captions))
        self.enter("loss")
        cache.backward(state.loss(*features, targets=self.targets(batch)))
        del features
        self.enter("replay")
        cache.replay()
        self.enter("optim")
        state.update(state.gradient_norm())
        self.enter("")
        state.optimizer.zero_grad()
        return self.memory

    def enter(self, stage: str) -> None:
        """A stage of the step begins: a phase, or a tower's part of it. Empty: the step ends."""
        peak = self.tracker.take_peak()
        if self.stage:
            self.memory.peak[self.stage] = max(peak, self.memory.peak.get(self.stage, 0))
        if stage in PHASES:
            self.memory.before[stage] = self.tracker.live
        self.stage = stage

    def targets(self, batch: int) -> Targets:
        """What the loss takes beside the features."""
        keys = torch.empty(batch, dtype=torch.int64) if self.config.data.same is not None else None
        rows = (torch.empty(batch, *teacher.shape, dtype=torch.float16) for teacher in self.state.teachers)
        return Targets(keys, tuple(rows))

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
        rows = self.inputs(tower, size).chunk(0, size)
        before = self.tracker.live
        with gradient_sync(cached.encoder, False):
            with cached.autocast():
                out = cached.encoder(rows)
            held = self.tracker.live - before
            out.backward(torch.empty_like(out))
        self.state.optimizer.zero_grad()
        return held


class StagedRows(ChunkLoader):
    """A tower's rows, made on demand. Asking for them begins that tower's stage of a step."""

    def __init__(self, run: DryRun, tower: int, rows: int) -> None:
        shape, dtype = (run.row, run.row_type) if tower == 0 else ((run.context_length,), torch.int32)

        def read(start: int, stop: int) -> Tensor:
            return torch.empty(stop - start, *shape, dtype=dtype)

        super().__init__(read, rows, CPU, resident=run.config.offload == "none")
        self.run, self.tower = run, TOWERS[tower]

    def chunk(self, start: int, stop: int) -> Tensor:
        if self.run.stage:
            self.run.enter(f"{self.run.stage.split()[0]} {self.tower}")
        return super().chunk(start, stop)


@contextmanager
def dry_run(config: TrainConfig, ranks: int, capability: int | None) -> Iterator[DryRun]:
    """A dry run on one of `ranks` GPUs of a compute capability, or (None) in one of `ranks` CPU processes."""
    with ExitStack() as stack:
        if ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        tracker = stack.enter_context(without_memory())
        if capability:
            stack.enter_context(cuda_autocast())
        yield DryRun(config, ranks, tracker, capability)
