"""What the step benchmark measures in a fresh process: variants of a step by name, their memory, their largest batch, and their time.

All variants compute the gradients of the same contrastive loss over the same samples with the same towers; none updates weights.
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

from clipscale.bench.harness import Job
from clipscale.bench.worker import Meter, Worker, is_out_of_memory
from clipscale.config.presets import conf_dir
from clipscale.config.sections import ModelConfig, PrecisionConfig
from clipscale.data.loader.captions import SortedCaptions
from clipscale.data.loader.host_batch import Arena, HostBatch, Layout
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.loss.api import contrastive_loss
from clipscale.models.flops import Flops
from clipscale.models.towers import ClipModel, architecture, build_model
from clipscale.step.grad_cache import GradCache
from clipscale.step.precision import Precision

CAPTION_MEAN, CAPTION_SPREAD = 2.833, 0.570
"""Of the logarithm of a caption's tokens, start and end included: mean 20, 99th percentile 64, and 0.4 % fill CLIP's context of 77."""
GOLDEN = (math.sqrt(5) - 1) / 2
POOL = 4
"""Chunks of distinct samples in host memory. A larger batch repeats them, so that its pixels need not all exist."""
KINDS = ("frozen", "compiled", "unsorted", "unlean", "neither")
FIRST = 64
"""The first batch that is tried to find the largest that fits."""
CLOSE = 1 / 8
"""The largest batch is known to this share."""
WARM = 2
"""Chunks that warm a method up."""


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

    def variant(self, text: str) -> StepVariant:
        """The method of that name, built once."""
        if text in self._variants:
            return self._variants[text]
        name = Name.of(text)
        frozen = name.kind == "frozen"
        if name.base.startswith("open_clip"):
            peer: Any = torch.compile(self.peer) if name.kind else self.peer  # as its trainer does with --torchcompile
            inputs: Callable[[int], Any] = partial(self.normalised, whole=name.whole)
            step: Callable[[Any, Meter], None] = partial(self.open_clip_step, peer)
        elif name.whole:
            inputs, step = self.on_device, partial(self.plain_step, self.model(name.kind), frozen)
        else:
            inputs, step = self.rows, self.cached_step(self.model(name.kind), name)
        flops = Flops(replace(self.config, freeze_image=frozen), self.device)
        return self._variants.setdefault(text, StepVariant(inputs, step, flops))

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

    def plain_step(self, model: ClipModel, frozen: bool, inputs: tuple[Tensor, Tensor], meter: Meter) -> None:
        """One graph over the whole batch."""
        with self.precision.autocast():
            with torch.set_grad_enabled(not frozen):
                u = model.image(inputs[0])
            v = model.text(inputs[1])
        loss_of(model, u, v).backward()
        meter("step")

    def cached_step(self, model: ClipModel, name: Name) -> Callable[[Any, Meter], None]:
        """The gradient cache; `keep-50`: half of all graphs are kept; `keep-20G`: 20 GiB of them are."""
        towers, base = [model.image, model.text], name.base
        cache = GradCache(
            towers,
            partial(loss_of, model),
            chunks=self.chunk,
            autocast=self.precision.autocast,
        )
        kept = base.removeprefix("keep-") if base.startswith("keep-") else "0"

        def budget(inputs: Sequence[ChunkLoader | SortedCaptions]) -> float:
            if kept.endswith("G"):
                return int(kept[:-1]) * 2**30
            if kept in ("0", "100"):
                return math.inf if kept == "100" else 0
            trained = [tower for tower in cache.towers if tower.trained]
            if not all(tower.graphs.bytes_each for tower in trained):  # the first time: measure a graph of each tower
                cache.keep_bytes = 1
                cache.encode(*inputs)
            total = 0.0
            for tower in trained:
                rows = inputs[cache.towers.index(tower)]
                whole = rows.contexts(tower.size) if isinstance(rows, SortedCaptions) else len(rows)
                total += tower.graphs.bytes_each * whole / min(tower.size, len(rows))
            return int(kept) / 100 * total

        def step(inputs: tuple[ChunkLoader, ChunkLoader], meter: Meter) -> None:
            images, texts = inputs
            # Sorted within the time, as in training.
            cut = SortedCaptions(texts.read, len(texts), self.device, pad=0, resident=False) if name.sorts else texts
            cache.keep_bytes = budget((images, cut))
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
        none = torch.optim.SGD(
            [torch.zeros(1)], lr=0.0
        )  # leaves gradients and weights alone; gradients are cleared between the steps
        train_one_epoch(peer, data, open_clip.ClipLoss(), 0, none, None, None, None, args)
        meter("step")


def loss_of(model: ClipModel, u: Tensor, v: Tensor) -> Tensor:
    return contrastive_loss(u, v, model.logit_scale.exp(), check=False)


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


# ---- what is measured ----


class StepWorker(Worker):
    """Cases are METHOD@BATCH, or METHOD@max for the largest batch that fits."""

    def __init__(self, job: Job, rank: int = 0, leave: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
        super().__init__(job, rank, leave)
        self.variants = StepVariants(device=job.device, **job.about)

    def facts(self) -> dict[str, Any]:
        return {"pinned": self.variants.pinned}

    def variant(self, case: str) -> StepVariant:
        return self.variants.variant(case.partition("@")[0])

    def release(self) -> None:
        """Gradients go, too."""
        for weights in self.variants.weights:
            weights.zero_grad()
        super().release()

    def probe(self, name: str, size: int) -> None:
        variant = self.variant(name)
        self.run(variant, min(self.variants.chunk, size))
        for weights in self.variants.weights:
            weights.zero_grad(set_to_none=False)
        inputs = variant.inputs(size)
        meter = Meter(self.device, self.memory())
        variant.step(inputs, meter)
        self.record(name)["memory"][str(size)] = meter.growth()

    def ready(self, case: str) -> None:
        """A few chunks warm up, or the search does. Compiled graphs of a whole batch take it all: each size is compiled anew."""
        size, name, record = case.partition("@")[2], Name.of(case), self.record(case)
        record["size"] = batch = self.largest(case) if size == "max" else int(size)
        if name.kind == "compiled" and name.whole:
            self.run(self.variant(case), batch)
        elif size != "max":
            self.run(self.variant(case), min(WARM * self.variants.chunk, batch))

    def largest(self, case: str) -> int:
        """The largest batch whose step runs: it is doubled until memory ends, then the gap is halved. Compiled towers take their twin's."""
        name = Name.of(case)
        if name.kind == "compiled":
            case = f"{name.base}@max"
        record = self.record(case)
        if "size" in record:
            return int(record["size"])
        record["tried"] = {}
        good, bad, size = 0, 0, min(FIRST, self.variants.chunk)
        while not bad or bad - good > max(1, CLOSE * bad):
            fits = self.fits(self.variant(case), size)
            record["tried"][size] = "fits" if fits else "out of memory"
            good, bad = (size, bad) if fits else (good, size)
            size = (good + bad) // 2 if bad else 2 * good
        if not good:
            raise MemoryError("out of memory: not even a step of one sample fits")
        record["size"] = good
        return good

    def fits(self, variant: StepVariant, batch: int) -> bool:
        """Does memory suffice for a step."""
        try:
            self.run(variant, batch)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self.clear()

    def clear(self) -> None:
        """Release, and give the allocator's unused blocks back."""
        self.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, case: str) -> None:
        """If the largest batch fitted alone but not beside the other methods, an eighth less is tried."""
        try:
            super().time(case)
            return
        except Exception as error:
            record = self.record(case)
            if not is_out_of_memory(error) or not case.endswith("@max") or record["size"] < FIRST // 4:
                raise
        record.setdefault("tried", {})[record["size"]] = "out of memory between the others"
        record |= {"size": record["size"] - record["size"] // 8, "steps": []}
        self.clear()
        self.time(case)

    def measured(self, case: str, meter: Meter) -> None:
        record, batch = self.record(case), self.record(case)["size"]
        flops = self.variant(case).flops
        record["flops"] = flops.per_sample
        record["mfu"] = flops.utilisation(batch / sum(meter.seconds.values()))
        if len(meter.seconds) > 1:
            record["parts"] = {f"{part}_s": seconds for part, seconds in meter.seconds.items()}
            record["parts"]["features_bytes"] = 2 * 4 * self.variants.model().width * batch  # float32, of both towers
            record["parts"] |= {f"mem_{part}_bytes": meter.peak[part] - meter.before[part] for part in meter.peak}
