"""Time and memory of a step's gradients: plain, with the gradient cache, with kept graphs, and by open_clip's loop.

    python benchmarks/step.py model=tiny batch=512 chunk=128
    python benchmarks/step.py model=vit-b16 precision=bf16 batch=32k chunk=256 methods=plain@1k,cache,keep-80G,open_clip

METHOD or METHOD@BATCH. All compute the gradients of the same loss over the same samples; none updates weights. `to
plain` compares seconds a sample with plain's at the same batch, or else at its largest.

    plain, open_clip-plain   one graph over the whole batch, by us and by open_clip
    cache, keep-20G          the gradient cache; with memory for 20 GiB of graphs (keep: for all)
    open_clip                its accumulation over chunks
    frozen-                  with a frozen image tower (plain, cache, keep)
    compiled-                the towers' blocks under torch.compile
    compiled_text-           so, and the text tower's, once for captions of any length
    unsorted-, unlean-       cache: captions as wide as the context; and with open_clip's own forward passes

A captioner (model=coca-b32) has its caption loss beside the contrast, and open_clip its CoCaLoss.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measure import Meter, Row, main, model_preset, ms, profiled, spread
from torch import Tensor

from clipscale import GradCache, contrastive_loss
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean
from clipscale.common.units import format_count, parse_count
from clipscale.config.model import TowerConfig
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.data.loader.to_device import ChunkLoader, TextLoader
from clipscale.data.tokenizer import Padding
from clipscale.models.captioner import count_caption_labels, init_decoder
from clipscale.models.encoders import describe_model
from clipscale.models.flops import Flops
from clipscale.models.towers import build_model
from clipscale.step.cache.encoder_io import LazyInput
from clipscale.step.compiled import compile_towers, innermost_blocks
from clipscale.step.pair_encoder import pair_encoder
from clipscale.step.precision import Precision

DEFAULTS = {
    "model": "tiny",  # a preset of conf/model
    "batch": 512,
    "chunk": 128,  # samples, of both towers
    "methods": "plain,cache,keep,frozen-plain,frozen,unsorted,unlean,open_clip,open_clip-plain",
    "precision": "fp32",  # or bf16 (autocast)
    "device": "auto",
    "repeats": 5,
    "rounds": 1,  # of all methods, one after the other; each is compared with the others of its round
    "clock": "wall",  # or processor: the seconds of all cores, on a CPU that others use too (set OMP_NUM_THREADS=1)
    "warm": 0,  # pairs of the warm-up; 0: two chunks, or the batch where graphs are kept
    "profile": 0,  # the slowest kernels to record of one more step, the time of each kind, and the time in none
    "out": "runs/bench",
}
KINDS = ("frozen", "compiled", "compiled_text", "unsorted", "unlean")
# The logarithm of a caption's tokens: their mean is 20, their 99th percentile 64, and 0.4 % fill CLIP's context of 77.
CAPTION_MEAN, CAPTION_SPREAD = 2.833, 0.570
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
GOLDEN = (math.sqrt(5) - 1) / 2
# open_clip weighs a captioner's loss so.
CAPTION_WEIGHT = 2.0
# Chunks of distinct samples in host memory. A larger batch repeats them, so that its pixels need not all exist.
POOL = 4


def named(method: str) -> tuple[str, str]:
    """`compiled-keep-20G` as kind and base; `frozen` is `frozen-cache`."""
    kind, _, base = method.partition("-")
    return (kind, base or "cache") if kind in KINDS else ("", method)


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    """Raises UserError for a method that is none."""
    common = {key: value for key, value in vars(settings).items() if key not in ("methods", "rounds", "out")}
    jobs = []
    for number, word in product(range(settings.rounds), settings.methods.split(",")):
        method, _, size = word.partition("@")
        base = named(method)[1]
        if base not in ("plain", "cache", "keep", "open_clip", "open_clip-plain") and not base.startswith("keep-"):
            raise UserError(
                f"methods={word}: unknown{did_you_mean(method, ('plain', 'cache', 'keep-20G', 'open_clip'))}"
            )
        batch = parse_count(size) if size else settings.batch
        jobs.append({"case": f"{method}@{batch}", "method": method, **common, "batch": batch, "round": number})
    return f"step-{settings.device}", jobs


class Step:
    """One way to compute gradients: `inputs(batch)`, and `run(inputs, meter)`, which leaves them in the parameters."""

    def __init__(self, method: str, model: str, chunk: int, precision: str, device: str) -> None:
        self.kind, self.base = named(method)
        self.chunk, self.device = chunk, torch.device(device)
        self.config = replace(model_preset(model), image=TowerConfig(train="none" if self.kind == "frozen" else "all"))
        self.precision = Precision.set_up(precision, self.device)
        torch.manual_seed(0)
        with self.device:  # drawing a large model's weights on a CPU takes longer than timing it
            self.model = build_model(self.config, lean=self.kind != "unlean").to(self.device)
        if self.kind.startswith("compiled"):
            lengths_vary = not self.base.endswith("plain")
            compile_towers(self.model, lengths_vary=lengths_vary)
            if self.kind == "compiled_text":
                for block in innermost_blocks(self.model.text.encoder):
                    block.compile(dynamic=True)
        keep = self.base.removeprefix("keep").removeprefix("-")
        keep_bytes: float = math.inf
        if self.base == "cache":
            keep_bytes = 0
        elif keep and keep[0].isdigit():
            keep_bytes = parse_count(keep)
        self.is_captioner = self.model.is_captioner
        self.cache = GradCache(
            [pair_encoder(self.model)] if self.is_captioner else [self.model.image, self.model.text],
            self.loss_of_pairs if self.is_captioner else self.loss,
            chunks=chunk, autocast=self.precision.autocast, keep_bytes=keep_bytes,
        )  # fmt: skip

    def loss_of_pairs(self, features: Tensor) -> Tensor:
        return self.loss(*(rows.contiguous() for rows in features.unbind(1)))

    def loss(self, u: Tensor, v: Tensor) -> Tensor:
        return contrastive_loss(u, v, self.model.logit_scale.exp(), check=False)

    @cached_property
    def pool(self) -> tuple[Tensor, Tensor]:
        """POOL chunks of random pixels and captions in host memory, page-locked for a GPU, as in training."""
        count, side, context = POOL * self.chunk, self.model.image_size, self.model.context_length
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        tokens = torch.randint(1, 49406, (count, context), generator=generator)
        # Lognormal lengths: quantiles spread evenly over every stretch of captions, so that any batch has its share.
        quantiles = torch.arange(1, count + 1, dtype=torch.float64).mul(GOLDEN).frac()
        sizes = (CAPTION_MEAN + CAPTION_SPREAD * torch.special.ndtri(quantiles)).exp().round().clamp(3, context).long()
        place = torch.arange(context)
        tokens = tokens.where(place < sizes[:, None] - 1, 0).where(place != sizes[:, None] - 1, 49407)
        return (pixels.pin_memory(), tokens.pin_memory()) if self.device.type == "cuda" else (pixels, tokens)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of the pool's captions."""
        return Padding(0).lengths(self.pool[1].numpy())

    def rows(self, host: Tensor, start: int, stop: int) -> Tensor:
        """Rows start to stop of the pool, which repeats without end."""
        first = start % len(host)
        if first + stop - start <= len(host):
            return host[first : first + stop - start]
        return host[torch.arange(start, stop) % len(host)]

    def inputs(self, batch: int) -> Any:
        """For the cache, which copies host rows chunk by chunk, their number; for the others rows on the device."""
        if not self.base.startswith(("plain", "open_clip")):
            return batch
        pixels, tokens = (x.to(self.device) for x in self.pool)
        if self.base == "plain":
            index = torch.arange(batch, device=self.device) % len(pixels)
            return pixels[index], tokens[index]
        size = batch if self.base == "open_clip-plain" else self.chunk
        chunks = [
            torch.arange(i, i + size, device=self.device) % len(pixels) for i in range(0, min(batch, POOL * size), size)
        ]
        tower = self.model.image
        distinct = [((pixels[rows] - tower.mean) / tower.std, tokens[rows]) for rows in chunks]
        return [distinct[i % len(distinct)] for i in range(batch // size)]

    def run(self, inputs: Any, meter: Callable[[str], None]) -> None:
        passes: dict[str, Callable[..., None]] = {
            "plain": self.plain,
            "open_clip": self.open_clip,
            "open_clip-plain": self.open_clip,
        }
        passes.get(self.base, self.cached)(inputs, meter)

    def plain(self, inputs: tuple[Tensor, Tensor], meter: Callable[[str], None]) -> None:
        with self.precision.autocast():
            if self.is_captioner:
                features, captions = pair_encoder(self.model)(*inputs)
            else:
                with torch.set_grad_enabled(self.kind != "frozen"):
                    u = self.model.image(inputs[0])
                v = self.model.text(inputs[1])
        if self.is_captioner:
            value = self.loss_of_pairs(features) + CAPTION_WEIGHT / count_caption_labels(inputs[1]) * captions
        else:
            value = self.loss(u, v)
        value.backward()
        meter("step")

    def cached(self, batch: int, meter: Callable[[str], None]) -> None:
        images, texts = (partial(self.rows, host) for host in self.pool)
        context = self.model.context_length
        captions: TextLoader
        if self.kind in ("unsorted", "unlean"):
            captions = TextLoader(texts, batch, context, self.device, stays_on_device=False)
        else:  # sorted within the time, as in training; workers have counted the tokens
            of_all = lambda: np.resize(self.lengths, batch)  # noqa: E731
            captions = SortedTexts(
                texts, of_all, batch, context, self.device, stays_on_device=False, has_equal_chunks=self.is_captioner
            )
        inputs: list[LazyInput] = [ChunkLoader(images, batch, self.device, stays_on_device=False), captions]
        weight = 1.0
        if self.is_captioner:
            inputs = [captions.with_images(images)]
            weight = CAPTION_WEIGHT / int(count_caption_labels(texts(0, batch)))
        representations = self.cache.encode(*inputs)
        meter("encode")
        self.cache.backward(self.cache.loss(*representations))
        meter("loss")
        self.cache.replay(chunk_loss_weight=weight)
        meter("replay")

    @cached_property
    def peer(self) -> Any:
        """open_clip's own model."""
        from open_clip.coca_model import CoCa
        from open_clip.model import CustomTextCLIP

        del self.model.image.encoder, self.model.text.encoder, self.model.decoder
        with self.device:
            if self.is_captioner:
                model = CoCa(**describe_model(self.config)).to(self.device)
                init_decoder(model.text_decoder)
            else:
                model = CustomTextCLIP(**describe_model(self.config), output_dict=True).to(self.device)
        return torch.compile(model) if self.kind == "compiled" else model  # as its trainer does with --torchcompile

    def open_clip(self, chunks: list[tuple[Tensor, Tensor]], meter: Callable[[str], None]) -> None:
        """One step of open_clip's own training loop with accumulation over the chunks it is given."""
        import open_clip
        from open_clip_train.train import train_one_epoch

        class Loader(list[Any]):
            num_batches, num_samples = len(chunks), sum(len(images) for images, _ in chunks)

        args = SimpleNamespace(
            device=str(self.device), precision="fp32" if self.precision.dtype == torch.float32 else "amp_bf16",
            accum_freq=len(chunks), batch_size=len(chunks[0][0]), rank=0, local_rank=0, world_size=1, distill=False,
            skip_scheduler=True, horovod=False, grad_clip_norm=None, log_every_n_steps=1, wandb=False, log_local=False,
        )  # fmt: skip
        data = {"train": SimpleNamespace(dataloader=Loader(chunks), set_epoch=lambda _: None)}
        none = torch.optim.SGD([torch.zeros(1)], lr=0.0)  # leaves weights and gradients alone
        loss = open_clip.CoCaLoss(CAPTION_WEIGHT, 1.0) if self.is_captioner else open_clip.ClipLoss()
        train_one_epoch(self.peer, data, loss, 0, none, None, None, None, args)
        meter("step")

    def clear(self) -> None:
        """Drop gradients."""
        for model in (self.model, *([self.peer] if "peer" in vars(self) else [])):
            model.zero_grad()


def measure(**job: Any) -> list[Row]:
    """Seconds of steps after a warm-up, and the memory of the first."""
    if job["method"].removeprefix("compiled-").startswith("open_clip") and find_spec("open_clip_train") is None:
        return [{"status": "not installed", "reason": "install open_clip_torch with its training loop"}]
    step = Step(job["method"], job["model"], job["chunk"], job["precision"], job["device"])
    flops = Flops.of_model(step.config, step.model, step.device)  # while the model has its towers
    whole = step.kind == "compiled" and step.base.endswith("plain")  # its graphs know one size alone
    batch, meters = job["batch"], []
    whole = whole or bool(step.cache.keep_bytes)  # the first step at a batch measures its graphs
    warm = batch if whole else min(job["warm"] or 2 * job["chunk"], batch)
    step.run(step.inputs(warm), lambda part: None)
    for _ in range(job["repeats"]):
        step.clear()
        inputs, meter = step.inputs(batch), Meter(step.device, CLOCKS[job["clock"]])
        step.run(inputs, meter)
        meters.append(meter)
    seconds = spread([sum(meter.seconds.values()) for meter in meters])
    rate, first = batch / seconds["median"], meters[0]
    row: Row = {"step_s": seconds, "samples_per_s": rate, "flops": flops.per_sample(), "mfu": flops.utilisation(rate)}
    row |= {"memory": {batch: first.growth()}, "peak_bytes": first.growth()}
    row["parts"] = {f"{part}_s": value for part, value in meters[-1].seconds.items()}
    row["parts"] |= {f"mem_{part}_bytes": first.peak[part] - first.before[part] for part in first.peak}
    row["chunk"] = step.chunk
    row["kept_graphs"] = step.cache.num_kept_graphs
    if job["profile"]:
        row["profile"] = profile(step, batch, job["profile"], 1e3 * seconds["median"])
    row["parts"]["features_bytes"] = 2 * 4 * step.model.embed_dim * batch  # float32, of both towers
    return [row]


# Kinds of kernels by patterns of their names; the first that fits.
KERNELS = {
    "attention": r"flash|fmha|attention|sdpa|compute_dot_do_o|convert_dq",
    "convolution": r"conv(?!ert)|implicit|nchw",
    "product": r"gemm|nvjet|cutlass|xmma|cublas|wgmma|splitK|aten::(add)?mm|aten::bmm",
    "norm": r"layer_norm|LayerNorm|GammaBeta",
    "gelu": r"[Gg]elu",
    "sum": r"reduce_kernel|aten::sum",
    "copy": r"[Mm]emcpy|copy|Cat|aten::cat|stack|clone|transpose",
    "other": r"",
}


def profile(step: Step, batch: int, most: int, step_ms: float) -> Row:
    """Milliseconds of one step by kind of kernel, and of the `most` slowest.

    `idle_ms`: of a step (`step_ms`), those in which no kernel runs but copies from the host. `launches`: of kernels.
    `host_share`: of the profiled step, the share in which the host does not wait for the device.
    """
    step.clear()
    inputs = step.inputs(batch)
    spent, host_share = profiled(lambda: step.run(inputs, lambda part: None), step.device)
    kinds = dict.fromkeys(KERNELS, 0.0)
    for name, _, took in spent:
        kinds[next(kind for kind, pattern in KERNELS.items() if re.search(pattern, name))] += took
    busy = sum(took for name, _, took in spent if "Memcpy HtoD" not in name)
    return {
        "kinds_ms": {kind: round(took, 2) for kind, took in kinds.items()},
        "idle_ms": round(step_ms - busy, 2),
        "launches": sum(calls for _, calls, _ in spent),
        "host_share": round(host_share, 3),
        "kernels": spent[:most],
    }


def compare(rows: list[Row]) -> None:
    """Seconds a sample, divided by plain's and by open_clip's plain step's at the same batch."""
    timed = [row for row in rows if "step_s" in row]
    for row in timed:
        plain = "frozen-plain" if named(row["method"])[0] == "frozen" else "plain"
        beside = [other for other in timed if other["round"] == row["round"]]
        row["ratio"] = time_beside(row, [other for other in beside if other["method"] == plain])
        same = [other for other in beside if other["method"] == "open_clip-plain" and other["batch"] == row["batch"]]
        row["to_open_clip"] = time_beside(row, same)


def time_beside(row: Row, others: list[Row]) -> float | None:
    other = max(others, key=lambda other: (other["batch"] == row["batch"], other["batch"]), default=None)
    return other["samples_per_s"] / row["samples_per_s"] if other else None


COLUMNS = {
    "method": lambda row: row["method"],
    "batch": lambda row: format_count(row["batch"]),
    "samples/s": lambda row: f"{row['samples_per_s']:,.0f}",
    "step ms": ms("step_s"),
    "to plain": lambda row: f"{row['ratio']:.2f}",
    "to open_clip": lambda row: f"{row['to_open_clip']:.2f}",
    "MFU": lambda row: f"{row['mfu']:.1%}",
    "idle ms": lambda row: f"{row['profile']['idle_ms']:,.1f}",
    "launches": lambda row: f"{row['profile']['launches']:,}",
    "host": lambda row: f"{row['profile']['host_share']:.0%}",
    "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:,.0f}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, compare)
