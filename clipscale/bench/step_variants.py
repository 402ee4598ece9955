"""The variants of a step that the step benchmark compares, by name: their inputs, models and the step itself.

All compute the gradients of the same contrastive loss over the same samples with the same towers; none updates weights.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from clipscale.bench.worker import Meter
from clipscale.config.presets import conf_dir
from clipscale.config.sections import ModelConfig, PrecisionConfig
from clipscale.data.loader.captions import SortedCaptions
from clipscale.data.loader.host_batch import Arena, HostBatch, Layout
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.grad_cache import GradCache
from clipscale.kept_graphs import WHOLE, checkpointing_switch
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel, Flops, architecture, build_model
from clipscale.precision import Precision

CAPTION_MEAN, CAPTION_SPREAD = 2.833, 0.570
"""Of the logarithm of a caption's tokens, start and end included: mean 20, 99th percentile 64, and 0.4 % fill CLIP's context of 77."""
GOLDEN = (math.sqrt(5) - 1) / 2
POOL = 4
"""Chunks of distinct samples in host memory. A larger batch repeats them, so that its pixels need not all exist."""
KINDS = ("frozen", "compiled", "unsorted", "unlean", "neither")
GIB = 2**30


@dataclass(frozen=True)
class Name:
    """`plain`, `cache`, `keep-50`, `keep-20G`, `open_clip`, `frozen-plain`, `frozen` (the cache), `compiled-keep-20G` and so on."""

    kind: str
    """`frozen` (image tower), `compiled` (both towers), `unsorted` (captions), `unlean` (towers), `neither` of both, or nothing."""
    base: str

    @classmethod
    def of(cls, text: str) -> "Name":
        """Of a method or a case. Raises ValueError for a name that is none."""
        text = text.partition("@")[0]
        first, _, rest = text.partition("-")
        kind, base = (first, rest or "cache") if first in KINDS else ("", text)
        known = ("plain", "cache", "open_clip", "open_clip-plain")[: 2 if kind not in ("", "compiled") else None]
        keep = re.fullmatch(r"keep-(\d+)(G?)", base)
        if base not in known and not (keep and int(keep[1]) >= 1 and (keep[2] or int(keep[1]) <= 100)):
            raise ValueError(text)
        return cls(kind, base)

    @property
    def baseline(self) -> str:
        """What its time is compared with."""
        return f"{self.kind}-plain" if self.kind in ("frozen", "compiled") else "plain"

    @property
    def sorts(self) -> bool:
        """Does it sort and cut captions."""
        return self.kind not in ("unsorted", "neither")

    @property
    def whole(self) -> bool:
        """Does it hold the graph of the whole batch."""
        return self.base.endswith("plain")


@dataclass(frozen=True)
class StepVariant:
    """One way to compute a step's gradients."""

    inputs: Callable[[int], Any]
    """Of a batch of so many samples, where the method takes them."""
    step: Callable[[Any, Meter], None]
    """Leaves gradients in the parameters."""
    flops: Flops


class StepVariants:
    """All variants over one model, on one device, with one chunk size."""

    def __init__(self, model: str, chunk: int, precision: str, device: str) -> None:
        self.chunk, self.device = chunk, torch.device(device)
        values = yaml.safe_load((conf_dir() / "model" / f"{model}.yaml").read_text(encoding="utf-8"))
        self.config = ModelConfig(**values)
        self.precision = Precision(PrecisionConfig(name=precision), self.device)
        self.weights: list[torch.nn.Module] = []
        """Of all models that are built."""
        self.pinned: bool | None = None
        """On CUDA: could the pool be page-locked, which copies that run beside computation need."""
        self._variants: dict[str, StepVariant] = {}
        self._models: dict[str, ClipModel] = {}
        self._flops: dict[bool, Flops] = {}

    def variant(self, text: str) -> StepVariant:
        """The method of that name, built once."""
        if text not in self._variants:
            self._variants[text] = self._built(Name.of(text))
        return self._variants[text]

    def _built(self, name: Name) -> StepVariant:
        if name.base.startswith("open_clip"):
            peer = self.compiled_peer if name.kind else self.peer
            step = partial(self.open_clip_step, peer)
            return StepVariant(partial(self.normalised, whole=name.whole), step, self.flops(False))
        model, frozen = self.model(name.kind), name.kind == "frozen"
        if name.whole:
            return StepVariant(self.on_device, self.plain_step(model, frozen), self.flops(frozen))
        return StepVariant(self.rows, self.cached_step(model, name), self.flops(frozen))

    def model(self, kind: str = "") -> ClipModel:
        kind = {"unsorted": "", "neither": "unlean"}.get(kind, kind)
        if kind not in self._models:
            config = replace(self.config, freeze_image=kind == "frozen", lean=kind != "unlean")
            torch.manual_seed(0)
            with self.device:  # drawing a large model's weights on a CPU takes longer than timing it
                model = build_model(config).to(self.device)
            for tower in (model.image, model.text):
                self.precision.convert(tower)
            if kind == "compiled":
                model.image.compile(dynamic=False)
                model.text.compile()
            self._models[kind] = model
            self.weights.append(model)
        return self._models[kind]

    def flops(self, frozen: bool) -> Flops:
        if frozen not in self._flops:
            self._flops[frozen] = Flops(replace(self.config, freeze_image=frozen), self.device)
        return self._flops[frozen]

    def features_bytes(self, batch: int) -> int:
        """Of the float32 features of both towers; their gradients take as many again."""
        width: int = architecture(self.config)["embed_dim"]
        return 2 * 4 * width * batch

    # ---- inputs ----

    @cached_property
    def pool(self) -> HostBatch:
        """POOL chunks of random pixels and captions in a training batch's arena in host memory, pinned for a CUDA device."""
        model, random = self.model(), np.random.default_rng(0)
        count, side, context = POOL * self.chunk, model.image_size, model.context_length
        self.arena = Arena(Layout(1, count, (3, side, side), context))
        (slot,) = self.arena.slots
        for row in slot["rows"]:
            row[:] = random.integers(0, 256, row.shape, np.uint8)
        for row, size in zip(slot["tokens"], caption_sizes(count, context)):
            row[: size - 1] = random.integers(1, 49406, size - 1)
            row[size - 1] = 49407
        if self.device.type == "cuda":
            self.arena.pin()
            self.pinned = torch.from_numpy(slot["rows"]).is_pinned()
        return HostBatch(slot, count, lambda _: None)

    def rows(self, batch: int) -> tuple[ChunkLoader, ChunkLoader]:
        """Host rows, copied to the device chunk by chunk, as in training with offload=host."""
        size = len(self.pool)
        load = partial(ChunkLoader, count=batch, device=self.device, resident=False)
        return load(partial(repeated, self.pool.pixels, size)), load(partial(repeated, self.pool.tokens, size))

    def on_device(self, batch: int) -> tuple[Tensor, Tensor]:
        """The same rows, all on the device."""
        size = len(self.pool)
        pixels, tokens = (rows(0, size).to(self.device) for rows in (self.pool.pixels, self.pool.tokens))
        index = torch.arange(batch, device=self.device) % size
        return pixels[index], tokens[index]

    def normalised(self, batch: int, whole: bool) -> list[tuple[Tensor, Tensor]]:
        """Chunks (or one) for open_clip's loop: float pixels on the device already, which spares it its copies; they repeat too."""
        size, tower = batch if whole else min(self.chunk, batch), self.model().image
        pixels, tokens = self.on_device(batch if whole else min(batch, POOL * size))
        distinct = list(zip(((pixels - tower.mean) / tower.std).split(size), tokens.long().split(size)))
        return [distinct[i % len(distinct)] for i in range(batch // size)]

    # ---- steps ----

    def loss_of(self, model: ClipModel) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda u, v: contrastive_loss(u, v, model.logit_scale.exp(), check=False)

    def plain_step(self, model: ClipModel, frozen: bool) -> Callable[[Any, Meter], None]:
        """One graph over the whole batch."""
        loss = self.loss_of(model)

        def step(inputs: tuple[Tensor, Tensor], meter: Meter) -> None:
            with self.precision.autocast():
                with torch.set_grad_enabled(not frozen):
                    u = model.image(inputs[0])
                v = model.text(inputs[1])
            loss(u, v).backward()
            meter("step")

        return step

    def cached_step(self, model: ClipModel, name: Name) -> Callable[[Any, Meter], None]:
        """The gradient cache; `keep-50`: half of all graphs are kept; `keep-20G`: 20 GiB of them are."""
        towers, base = [model.image, model.text], name.base
        config = replace(self.config, compile=name.kind == "compiled")
        cache = GradCache(
            towers,
            self.loss_of(model),
            chunks=self.chunk,
            checkpointing=[checkpointing_switch(tower, config) for tower in towers],
            autocast=self.precision.autocast,
        )
        kept = base.removeprefix("keep-") if base.startswith("keep-") else "0"

        def budget(inputs: Sequence[ChunkLoader | SortedCaptions]) -> float:
            if kept.endswith("G"):
                return int(kept[:-1]) * GIB
            share, trained = int(kept) / 100, [tower for tower in cache.towers if tower.trained]
            if share in (0, 1):
                return share * math.inf if share else 0
            if not all(tower.graphs.costs[WHOLE] for tower in trained):  # the first time: measure a graph of each tower
                for tower in trained:
                    cache.budget.bytes = 1
                    switch, tower.graphs.switch = tower.graphs.switch, None
                    tower.encode(inputs[cache.towers.index(tower)])
                    tower.graphs.switch = switch
            total = 0.0
            for tower in trained:
                rows = inputs[cache.towers.index(tower)]
                whole = rows.contexts(tower.size) if isinstance(rows, SortedCaptions) else len(rows)
                total += tower.graphs.costs[WHOLE] * whole / min(tower.size, len(rows))
            return share * total

        def step(inputs: tuple[ChunkLoader, ChunkLoader], meter: Meter) -> None:
            images, texts = inputs
            # Sorted within the time, as in training.
            cut = SortedCaptions(texts.rows, len(texts), self.device, pad=0, resident=False) if name.sorts else texts
            cache.budget.bytes = budget((images, cut))
            representations = cache.encode(images, cut)
            meter("encode")
            cache.backward(cache.loss(*representations))
            meter("loss")
            cache.replay()
            meter("replay")

        return step

    @cached_property
    def peer(self) -> torch.nn.Module:
        """open_clip's own model."""
        from open_clip.model import CustomTextCLIP

        torch.manual_seed(0)
        with self.device:
            model = CustomTextCLIP(**architecture(self.config), output_dict=True).to(self.device)
        self.weights.append(model)
        return model

    @cached_property
    def compiled_peer(self) -> Any:
        """The same, compiled as its trainer does with --torchcompile."""
        return torch.compile(self.peer)

    def open_clip_step(self, peer: torch.nn.Module, inputs: list[tuple[Tensor, Tensor]], meter: Meter) -> None:
        """One step of open_clip's own training loop with accumulation over the chunks it is given."""
        import open_clip
        from open_clip_train.train import train_one_epoch

        chunks = _Loader(inputs)
        args = SimpleNamespace(
            device=str(self.device), precision="amp_bf16" if self.precision.dtype == torch.bfloat16 else "fp32",
            accum_freq=len(chunks), batch_size=len(inputs[0][0]), rank=0, local_rank=0, world_size=1, distill=False,
            skip_scheduler=True, horovod=False, grad_clip_norm=None, log_every_n_steps=1, wandb=False, log_local=False,
        )  # fmt: skip
        data = {"train": SimpleNamespace(dataloader=chunks, set_epoch=lambda _: None)}
        train_one_epoch(peer, data, open_clip.ClipLoss(), 0, _NoOptimizer(), None, None, None, args)
        meter("step")


def caption_sizes(count: int, context: int) -> list[int]:
    """Tokens of `count` captions, lognormal: quantiles spread evenly over every stretch of captions, so that any batch has its share."""
    quantiles = torch.arange(1, count + 1, dtype=torch.float64).mul(GOLDEN).frac()
    sizes = (CAPTION_MEAN + CAPTION_SPREAD * torch.special.ndtri(quantiles)).exp()
    return sizes.round().clamp(3, context).long().tolist()


def repeated(rows: Callable[[int, int], Tensor], size: int, start: int, stop: int) -> Tensor:
    """Rows start to stop of a pool of `size` rows that repeats without end."""
    first = start % size
    if first + stop - start <= size:
        return rows(first, first + stop - start)
    pool = rows(0, size)
    return pool[torch.arange(start, stop, device=pool.device) % size]


class _Loader(list[Any]):
    """Chunks as open_clip's loop takes them."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return sum(len(images) for images, _ in self)


class _NoOptimizer:
    """Leaves gradients and weights alone: forward and backward are compared, and gradients are cleared between the steps."""

    param_groups = ({"lr": 0.0},)

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass
