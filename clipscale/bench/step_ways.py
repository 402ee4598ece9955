"""The ways to compute a step's gradients that the step benchmark compares: inputs, models and the step itself, by name.

All compute the gradients of the same contrastive loss over the same samples with the same towers; none updates weights.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from clipscale.config.presets import conf_dir
from clipscale.config.sections import ModelConfig, PrecisionConfig
from clipscale.data.loader.host_batch import Arena, HostBatch, Layout
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.grad_cache import GradCache
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel, Flops, architecture, build_model
from clipscale.phases import Phases
from clipscale.precision import Precision

WORDS = 12
"""Tokens of a caption; the rest of the context is padding, as in most captions."""
POOL = 4
"""Chunks of distinct samples in host memory; a larger batch comes back to them, so that its pixels need not all exist."""
VARIANTS = ("frozen", "compiled")
GIB = 2**30


@dataclass(frozen=True)
class Name:
    """`plain`, `cache`, `keep-50`, `keep-20G`, `open_clip`, `frozen-plain`, `frozen` (the cache), `compiled-keep-20G` and so on."""

    variant: str
    """`frozen` (image tower), `compiled` (both towers) or nothing."""
    base: str

    @classmethod
    def of(cls, text: str) -> "Name":
        """Raises ValueError for a name that is none."""
        first, _, rest = text.partition("-")
        variant, base = (first, rest or "cache") if first in VARIANTS else ("", text)
        known = ("plain", "cache") if variant else ("plain", "cache", "open_clip", "open_clip-plain")
        keep = re.fullmatch(r"keep-(\d+)(G?)", base)
        if base not in known and not (keep and int(keep[1]) >= 1 and (keep[2] or int(keep[1]) <= 100)):
            raise ValueError(text)
        return cls(variant, base)

    @property
    def baseline(self) -> str:
        """What its time is compared with."""
        return f"{self.variant}-plain" if self.variant else "plain"

    @property
    def whole(self) -> bool:
        """Does it hold the graph of the whole batch."""
        return self.base.endswith("plain")


@dataclass(frozen=True)
class Way:
    """One way to compute a step's gradients."""

    inputs: Callable[[int], Any]
    """Of a batch of so many samples, where the method wants them."""
    step: Callable[[Any], Phases | None]
    """Leaves gradients in the parameters; the seconds and the memory of its parts, where it has parts."""
    flops: Flops


def model_config(name: str) -> ModelConfig:
    """A preset of conf/model."""
    values = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return ModelConfig(**values)


class Ways:
    """All ways over one model, on one device, with one size of chunk."""

    def __init__(self, model: str, chunk: int, precision: str, device: str) -> None:
        self.chunk, self.device = chunk, torch.device(device)
        self.config = model_config(model)
        self.precision = Precision(PrecisionConfig(name=precision), self.device)
        self.known: dict[str, Way] = {}
        self.models: dict[str, ClipModel] = {}
        self.peer: torch.nn.Module | None = None
        self.weights: list[torch.nn.Module] = []
        self.flops: dict[bool, Flops] = {}
        self.arena: Arena | None = None
        self.pool: HostBatch | None = None
        self.pinned: bool | None = None
        """On CUDA: could the pool be page-locked, which copies that run beside computation need."""

    def way(self, text: str) -> Way:
        """The method of that name, built once."""
        if text not in self.known:
            name = Name.of(text)
            if name.base.startswith("open_clip"):
                inputs = partial(self.normalised, whole=name.whole)
                self.known[text] = Way(inputs, self.open_clip_step(), self.flops_of(False))
            else:
                model, frozen = self.model(name.variant), name.variant == "frozen"
                flops = self.flops_of(frozen)
                if name.whole:
                    self.known[text] = Way(self.on_device, self.plain_step(model, frozen), flops)
                else:
                    self.known[text] = Way(self.rows, self.cached_step(model, name.base), flops)
        return self.known[text]

    def model(self, variant: str = "") -> ClipModel:
        if variant not in self.models:
            torch.manual_seed(0)
            with self.device:  # drawing a large model's weights on a CPU takes longer than timing it
                model = build_model(replace(self.config, freeze_image=variant == "frozen")).to(self.device)
            if variant == "compiled":
                model.image.compile(dynamic=False)
                model.text.compile(dynamic=False)
            self.models[variant] = model
            self.weights.append(model)
        return self.models[variant]

    def flops_of(self, frozen: bool) -> Flops:
        if frozen not in self.flops:
            self.flops[frozen] = Flops(replace(self.config, freeze_image=frozen), self.device)
        return self.flops[frozen]

    def features_bytes(self, batch: int) -> int:
        """Of the float32 features of both towers; their gradients are as many again."""
        width: int = architecture(self.config)["embed_dim"]
        return 2 * 4 * width * batch

    # ---- inputs ----

    def samples(self) -> HostBatch:
        """POOL chunks of random pixels and captions in a training batch's arena in host memory, pinned for a CUDA device."""
        if self.pool is None:
            model, random = self.model(), np.random.default_rng(0)
            count, side, words = POOL * self.chunk, model.image_size, min(WORDS, model.context_length - 1)
            arena = Arena(Layout(1, count, (3, side, side), model.context_length))
            (slot,) = arena.slots
            for row in slot["rows"]:
                row[:] = random.integers(0, 256, row.shape, np.uint8)
            slot["tokens"][:, :words] = random.integers(1, 49406, (count, words))
            slot["tokens"][:, words] = 49407
            if self.device.type == "cuda":
                arena.pin()
                self.pinned = torch.from_numpy(slot["rows"]).is_pinned()
            self.arena, self.pool = arena, HostBatch(slot, count, lambda _: None)
        return self.pool

    def rows(self, batch: int) -> tuple[ChunkLoader, ChunkLoader]:
        """Host rows, copied to the device chunk by chunk, as in training with offload=host."""
        pool = self.samples()
        pixels, tokens = (
            ChunkLoader(_Around(rows, len(pool)), batch, self.device, resident=False)
            for rows in (pool.pixels, pool.tokens)
        )
        return pixels, tokens

    def on_device(self, batch: int) -> tuple[Tensor, Tensor]:
        """The same rows, all on the device."""
        pool = self.samples()
        distinct = [rows(0, len(pool)).to(self.device) for rows in (pool.pixels, pool.tokens)]
        pixels, tokens = (_Around(lambda start, stop, x=x: x[start:stop], len(pool))(0, batch) for x in distinct)  # type: ignore[misc]
        return pixels, tokens

    def normalised(self, batch: int, whole: bool) -> list[tuple[Tensor, Tensor]]:
        """Chunks (or one) for open_clip's loop: float pixels on the device already, which spares it its copies; they come back too."""
        size, tower = batch if whole else min(self.chunk, batch), self.model().image
        distinct = (
            [self.on_device(size)]
            if whole
            else list(zip(*(x.split(size) for x in self.on_device(min(batch, POOL * size)))))
        )
        chunks = [((pixels - tower.mean) / tower.std, tokens.long()) for pixels, tokens in distinct]
        return [chunks[i % len(chunks)] for i in range(batch // size)]

    # ---- steps ----

    def loss_of(self, model: ClipModel) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda u, v: contrastive_loss(u, v, model.logit_scale.exp(), check=False)

    def plain_step(self, model: ClipModel, frozen: bool) -> Callable[[Any], None]:
        """One graph over the whole batch."""
        loss = self.loss_of(model)

        def step(inputs: tuple[Tensor, Tensor]) -> None:
            with self.precision.autocast():
                with torch.set_grad_enabled(not frozen):
                    u = model.image(inputs[0])
                v = model.text(inputs[1])
            loss(u, v).backward()

        return step

    def cached_step(self, model: ClipModel, base: str) -> Callable[[Any], Phases]:
        """The gradient cache; `keep-50`: with room for half of all graphs; `keep-20G`: with so many bytes for them."""
        towers = [model.image, model.text]
        cache = GradCache(towers, self.loss_of(model), chunks=self.chunk, autocast=self.precision.autocast)
        room = base.removeprefix("keep-") if base.startswith("keep-") else "0"

        def budget(inputs: tuple[ChunkLoader, ChunkLoader]) -> float:
            if room.endswith("G"):
                return int(room[:-1]) * GIB
            share, trained = int(room) / 100, [tower for tower in cache.towers if tower.trained]
            if share and not all(
                tower.cost for tower in trained
            ):  # the first time: one graph of each tower, to measure it
                for tower in trained:
                    cache.budget.bytes = 1
                    tower.encode(inputs[0] if tower is cache.towers[0] else inputs[1])
            count = len(inputs[0])
            return math.inf if share == 1 else share * sum(t.cost * count / min(t.size, count) for t in trained)

        def step(inputs: tuple[ChunkLoader, ChunkLoader]) -> Phases:
            cache.budget.bytes = budget(inputs)
            phases = Phases(self.device)
            with phases("encode"):
                representations = cache.encode(*inputs)
            with phases("loss"):
                cache.backward(cache.loss(*representations))
            with phases("replay"):
                cache.replay()
            return phases

        return step

    def open_clip_step(self) -> Callable[[Any], None]:
        """One step of open_clip's own training loop with accumulation over the chunks it is given."""
        import open_clip
        from open_clip.model import CustomTextCLIP
        from open_clip_train.train import train_one_epoch

        if self.peer is None:
            torch.manual_seed(0)
            with self.device:
                self.peer = CustomTextCLIP(**architecture(self.config), output_dict=True).to(self.device)
            self.weights.append(self.peer)
        model, loss = self.peer, open_clip.ClipLoss()
        precision = "amp_bf16" if self.precision.dtype == torch.bfloat16 else "fp32"

        def step(inputs: list[tuple[Tensor, Tensor]]) -> None:
            chunks = _Loader(inputs)
            args = SimpleNamespace(
                device=str(self.device), precision=precision, accum_freq=len(chunks), batch_size=len(inputs[0][0]), rank=0,
                local_rank=0, world_size=1, distill=False, skip_scheduler=True, horovod=False, grad_clip_norm=None,
                log_every_n_steps=1, wandb=False, log_local=False,
            )  # fmt: skip
            data = {"train": SimpleNamespace(dataloader=chunks, set_epoch=lambda _: None)}
            train_one_epoch(model, data, loss, 0, _NoOptimizer(), None, None, None, args)

        return step


class _Around:
    """Rows of a pool of so many, from its start again where it ends."""

    def __init__(self, rows: Callable[[int, int], Tensor], size: int) -> None:
        self.rows, self.size = rows, size

    def __call__(self, start: int, stop: int) -> Tensor:
        first = start % self.size
        if first + stop - start <= self.size:
            return self.rows(first, first + stop - start)
        pool = self.rows(0, self.size)
        return pool[torch.arange(start, stop, device=pool.device) % self.size]


class _Loader(list[Any]):
    """Chunks as open_clip's loop wants them."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return sum(len(images) for images, _ in self)


class _NoOptimizer:
    """Leaves gradients and weights alone: only forward and backward are compared, and gradients are cleared between the steps."""

    param_groups = ({"lr": 0.0},)

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass
