"""An optimizer step without memory: the learner's own code, over tensors that have shapes only, on one of P ranks that do not exist.

b: samples of one rank, c: samples of a chunk, P: ranks, D: feature width.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of tensors without memory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipscale.config.train import TrainConfig
from clipscale.data.features import StoredFeatures
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed import World, synchronised
from clipscale.models.towers import ClipModel, build_model
from clipscale.plan.live import LiveBytes, as_on_cuda, without_memory
from clipscale.train_state import Learner

CPU = torch.device("cpu")
TOWERS = ("image", "text")
PHASES = ("encode", "loss", "replay", "optim")


@dataclass
class Step:
    """Bytes of one step."""

    before: dict[str, int]
    """By phase (encode, loss, replay, optim): what is there when it begins."""
    peak: dict[str, int]
    """By stage: the most there is at once. A tower without a second pass has no such stage."""


class RehearsedWorld(World):
    """One rank among `size` that all say the same."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, value: Any) -> Any:
        return value

    def mesh(self) -> DeviceMesh:
        with unset_fake_temporarily():  # its table of ranks has values
            return super().mesh()

    def wrap(self, tower: nn.Module, parallel: str = "ddp") -> nn.Module:
        trained = any(p.requires_grad for p in tower.parameters())
        if self.size > 1 and trained and parallel == "ddp":
            return Buckets(synchronised(tower))
        return super().wrap(tower, parallel)


class Buckets(nn.Module):
    """What DDP's reducer, whose C++ wants values, does to memory with `gradient_as_bucket_view`.

    Buckets as large as all gradients are there from the start. Gradients under `no_sync` are tensors of their own; in the backward that
    synchronises each becomes a view of its bucket.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.module = tower
        self.views = {p: torch.empty_like(p, requires_grad=False) for p in tower.parameters() if p.requires_grad}
        self.summing = self.wanted = True
        for p in self.views:
            p.register_post_accumulate_grad_hook(self.move)

    def forward(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            self.summing = self.wanted
        return self.module(*inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.wanted = False
        yield
        self.wanted = True

    def move(self, p: Tensor) -> None:
        if self.summing:
            p.grad = self.views[p]  # type: ignore[index]


class Idle(nn.Module):
    """Features (n, D) of any rows, at no cost."""

    def __init__(self, width: int, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=trained)

    def forward(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)[:, :1].float() * self.weight


class RehearsedLearner(Learner):
    """The learner with weights that nobody has drawn or loaded, and chunks to be set later."""

    def build_model(self) -> ClipModel:
        return build_model(replace(self.config.model, pretrained=None, pretrained_image=None))

    def stored_rows(self) -> StoredFeatures | None:
        member = self.config.data.stored_member
        return StoredFeatures(member, self.model.width, "float16") if member else None

    def chunks(self) -> list[int]:
        return [1, 1]


class Rehearsal:
    """A learner to run steps of; make it with `rehearsed`."""

    def __init__(self, config: TrainConfig, ranks: int, memory: LiveBytes, folder: Path, *, cuda: bool) -> None:
        self.config, self.ranks, self.memory = config, ranks, memory
        self.learner = RehearsedLearner(config, RehearsedWorld(0, ranks, CPU), folder, None)
        if cuda and type(self.learner.optimizer).__module__.startswith("torch.optim"):
            for group in self.learner.optimizer.param_groups:  # what torch chooses by itself on CUDA
                group["foreach"] = True if group.get("foreach", False) is None else group.get("foreach", False)
        self.learner.precision.scaler = None  # a number or two, and a look at every gradient
        model = self.learner.model
        self.context_length, self.image_size = model.context_length, model.image_size
        self.row = (self.learner.stored.width,) if self.learner.stored else (3, self.image_size, self.image_size)
        self.row_type = getattr(torch, self.learner.stored.dtype if self.learner.stored else "uint8")
        self.width = model.width
        self._make_optimizer_state()
        if config.launch.parallel == "fsdp" and ranks > 1:
            self.step((1, 1), 1)  # FSDP2 arranges its memory in the first
        self.at_rest = memory.live
        """Bytes between steps."""

    def _make_optimizer_state(self) -> None:
        for group in self.learner.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.empty_like(p)
        self.learner.update(self.learner.gradient_norm())
        self.learner.optimizer.zero_grad()

    def fixed(self) -> dict[str, int]:
        """Bytes that are there between steps, by what they are."""
        states = [x for state in self.learner.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        masters = [x for held in self.learner.masters.values() for x in held.copies.values()]
        buckets = [
            x
            for tower in self.learner.cache.towers
            if isinstance(tower.encoder, Buckets)
            for x in tower.encoder.views.values()
        ]
        parts = {
            name: sum(map(held_bytes, xs))
            for name, xs in (("master weights", masters), ("optimizer state", states), ("DDP buckets", buckets))
        }
        return {"weights": self.at_rest - sum(parts.values())} | {name: size for name, size in parts.items() if size}

    def gradient_bytes(self) -> int:
        """Bytes of all gradients of the whole model."""
        return sum(p.nbytes for group in self.learner.optimizer.param_groups for p in group["params"])

    def step(self, chunks: tuple[int, int], batch: int) -> Step:
        """One step as in `clipscale.train`, over `batch` samples of this rank, in chunks of so many for each tower."""
        step = self.gradients(chunks, batch)
        self.memory.since()
        step.before["optim"] = self.memory.live
        self.learner.update(self.learner.gradient_norm())
        step.peak["optim"] = self.memory.since()
        self.learner.optimizer.zero_grad()
        return step

    def gradients(self, chunks: tuple[int, int], batch: int) -> Step:
        """The step up to its gradients."""
        learner, memory = self.learner, self.memory
        for tower, size in zip(learner.cache.towers, chunks):
            tower.size = size
        step = Step({}, {})
        current = ""

        def enter(stage: str) -> None:
            nonlocal current
            peak = memory.since()
            if current:
                step.peak[current] = max(peak, step.peak.get(current, 0))
            current = stage

        def begin(phase: str) -> None:
            enter("")
            step.before[phase] = memory.live

        class Rows(ChunkLoader):
            """Rows out of nowhere; the first of a pass that are asked for begin a stage."""

            tower = ""

            def chunk(self, start: int, stop: int) -> Tensor:
                enter(f"{phase} {self.tower}")
                return super().chunk(start, stop)

        def rows(tower: str, make: Callable[[int], Tensor]) -> Rows:
            made = Rows(lambda i, j: make(j - i), batch, CPU, resident=self.config.offload == "none")
            made.tower = tower
            return made

        learner.optimizer.zero_grad()
        images = rows("image", lambda n: torch.empty(n, *self.row, dtype=self.row_type))
        texts = rows("text", lambda n: torch.empty(n, self.context_length, dtype=torch.int32))
        phase = "encode"
        begin(phase)
        features = learner.cache.encode(images, texts)
        begin("loss")
        enter("loss")
        learner.cache.backward(learner.loss(*features))
        del features
        begin("replay")
        phase = "replay"
        learner.cache.replay()
        enter("")
        return step

    def per_sample(self) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes by which each sample of the batch adds to `Step.before` and `Step.peak`, whatever the towers: features, and what stays of
        the input. From steps of three and of four chunks of towers that do next to nothing."""
        towers, size = self.learner.cache.towers, 64
        whole, steps = [tower.encoder for tower in towers], []
        for count in (3, 4):
            for tower, encoder in zip(towers, whole):
                tower.encoder = encoder
                tower.encoder = Idle(self.width, tower.trained)
            steps.append(self.gradients((size, size), count * size))
        for tower, encoder in zip(towers, whole):
            tower.encoder = encoder
        self.learner.optimizer.zero_grad()
        three, four = steps
        before, peak = (
            {name: (b[name] - a[name]) / size for name in a}
            for a, b in ((three.before, four.before), (three.peak, four.peak))
        )
        return before, peak

    def loss(self, batch: int) -> int:
        """Bytes of the loss of `batch` samples of this rank, and of its gradients, beyond the features' own."""
        towers = self.learner.cache.towers
        features = [torch.empty(batch, self.width).requires_grad_(tower.trained) for tower in towers]
        self.memory.since()
        before = self.memory.live
        self.learner.loss(*features).backward()
        self.learner.optimizer.zero_grad()
        return self.memory.since() - before

    def graph(self, tower: int, size: int) -> int:
        """Bytes that the graph of one chunk of that tower holds when it is kept for the second pass."""
        kept = self.learner.cache.towers[tower]
        if not kept.trained:
            return 0
        make = (
            torch.empty(size, *self.row, dtype=self.row_type)
            if tower == 0
            else torch.empty(size, self.context_length, dtype=torch.int32)
        )
        before = self.memory.live
        with kept.autocast():
            out = kept.encoder(make)
        held = self.memory.live - before
        del out
        return held


@contextmanager
def rehearsed(config: TrainConfig, ranks: int, capability: int | None) -> Iterator[Rehearsal]:
    """A rehearsal of `config` on one of `ranks` GPUs of that compute capability, or (None) processes on a CPU."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clipscale-plan-")))
        if ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        memory = stack.enter_context(without_memory())
        stack.enter_context(as_on_cuda(capability) if capability else nullcontext())
        yield Rehearsal(config, ranks, memory, folder, cuda=capability is not None)


def held_bytes(x: Tensor) -> int:
    """Of a sharded tensor, this rank's part."""
    return x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes
