"""The tables of `sources.py`: each function calculates or measures one, and says how its rows are shown.

Published figures are of arXiv 2410.17243.
"""

import tempfile
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import published
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Columns, Row, counts
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils.checkpoint import checkpoint

import clipscale
from clipscale.cli.compose import compose_settings
from clipscale.cli.words import overrides_of
from clipscale.tools.plan.planner import plan

GIB = 2**30
# What an A800 with 80 GB has left for a program.
USABLE = 79 * GIB
Rows = tuple[list[Row], Columns]

# ---- Inf-CL ----

# Model, GPUs, offload -> the largest batch in k.
TABLE_2 = {
    ("vit-b16", 8, False): {"clip": 68, "openclip": 172, "infcl": 800},
    ("vit-b16", 32, False): {"clip": 68, "openclip": 360, "infcl": 3456},
    ("vit-l14", 8, False): {"clip": 64, "openclip": 152, "infcl": 448},
    ("vit-l14", 32, False): {"clip": 64, "openclip": 352, "infcl": 2048},
    ("vit-l14", 8, True): {"clip": 64, "openclip": 184, "infcl": 4096},
    ("vit-l14", 32, True): {"clip": 64, "openclip": 368, "infcl": 12288},
}
# GiB of the loss; 64k by the first row, and four GPUs by the second's quarter of it.
TABLE_4 = {"clip": 66.21, "openclip": 16.96, "ring alone": 4.81, "infcl": 0.81}
# Batch in k -> seconds a step of Inf-CL, as printed in the figure; 32k reads 25.0 or 25.1.
FIGURE_4 = {32: 25.1, 64: 49.4, 128: 98.3, 256: 200.3}


def gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}"


def table1(settings: SimpleNamespace) -> Rows:
    model, rows = published.measured("vit-l14", 128, "fp16"), []
    for (gpus, method, offload), cells in published.TABLE_1.items():
        for k, cell in zip((32, 64, 128, 256, 1024), cells, strict=True):
            kind = published.METHODS[method]
            sizes = published.figures(model, kind, batch=k * 1024, gpus=gpus, chunk=128, offload=offload)
            loss, peak = sizes["published_loss_bytes"], sizes["published_peak_bytes"]
            row = {
                "gpus": gpus,
                "method": method + " with offload" * offload,
                "batch": f"{k}k",
                "loss": loss,
                "peak": peak,
            }
            if cell:
                row |= dict(zip(("their loss", "their peak"), (float(x) * GIB for x in cell.split()), strict=True))
            rows.append(row)
    return rows, {
        "GPUs": lambda row: str(row["gpus"]),
        "method": lambda row: row["method"],
        "batch": lambda row: row["batch"],
        "loss, GiB": lambda row: gib(row["loss"]),
        "published": lambda row: gib(row["their loss"]) if "their loss" in row else "",
        "ratio": lambda row: ratio(row["loss"], row["their loss"]),
        "peak, GiB": lambda row: gib(row["peak"]),
        "published ": lambda row: gib(row["their peak"]) if "their peak" in row else "does not fit",
        "ratio ": lambda row: (
            ratio(row["peak"], row["their peak"]) if "their peak" in row else "fits" * (row["peak"] <= USABLE)
        ),
    }


def table2(settings: SimpleNamespace) -> Rows:
    rows = []
    for (name, gpus, offload), largest in TABLE_2.items():
        model = published.measured(name, 128, "fp16")
        for method, theirs in largest.items():

            def fits(
                k: int, method: str = method, gpus: int = gpus, offload: bool = offload, model: Any = model
            ) -> bool:
                kind = published.METHODS[method]
                sizes = published.figures(model, kind, batch=k * 1024, gpus=gpus, chunk=128, offload=offload)
                return bool(sizes["published_peak_bytes"] <= USABLE)

            low, high = 1, 1
            while fits(high):
                low, high = high, 2 * high
            while high - low > 1:
                low, high = ((low + high) // 2, high) if fits((low + high) // 2) else (low, (low + high) // 2)
            rows.append({"model": name, "gpus": gpus, "offload": offload, "method": method, "k": low, "theirs": theirs})
    return rows, {
        "model": lambda row: row["model"] + " with offload" * row["offload"],
        "GPUs": lambda row: str(row["gpus"]),
        "method": lambda row: row["method"],
        "largest batch": lambda row: f"{row['k']}k",
        "published": lambda row: f"{row['theirs']}k",
        "ratio": lambda row: ratio(row["k"], row["theirs"]),
    }


def table4(settings: SimpleNamespace) -> Rows:
    batch, gpus, width = 64 * 1024, 4, 512
    local = batch // gpus
    sizes = {}
    for name in ("clip", "openclip", "infcl"):
        kind = published.METHODS[name]
        scores = kind.matrices * batch * (batch if kind.all_rows else local)
        sizes[name] = 4 * (scores + width * (kind.gathered * batch + kind.local * local))
    sizes["ring alone"] = sizes["infcl"] + 4 * 4 * local**2  # the four matrices of one block
    rows = [{"method": name, "loss": sizes[name], "theirs": theirs * GIB} for name, theirs in TABLE_4.items()]
    return rows, {
        "method": lambda row: row["method"],
        "loss, GiB": lambda row: gib(row["loss"]),
        "published": lambda row: gib(row["theirs"]),
        "ratio": lambda row: ratio(row["loss"], row["theirs"]),
    }


def figure4(settings: SimpleNamespace) -> Rows:
    rows = []
    for k in (32, 64, 128, 256, 512, 1024):
        words = ("model=vit-l14", f"batch={k}k", "hardware=a800-80g", "gpus=8", "precision=fp16", "cache.keep=none")
        result = plan(compose_settings("plan", overrides_of("plan", words)[1]), search=False)
        rows.append({"k": k, "step_s": result["step_s"], "sample_s": result["step_s"] / k, "theirs": FIGURE_4.get(k)})
    return rows, {
        "batch": lambda row: f"{row['k']}k",
        "s a step": lambda row: f"{row['step_s']:.1f}",
        "published": lambda row: str(row["theirs"] or ""),
        "ratio": lambda row: ratio(row["step_s"], row["theirs"]) if row["theirs"] else "",
        "of 32k's, a sample": lambda row: ratio(row["sample_s"], rows[0]["sample_s"]),
    }


# ---- Gradient Cache ----


class TextEncoder(nn.Module):
    """A small transformer over tokens (N, T); its output is the normalised mean over T, (N, width)."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.checkpoints = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return F.normalize(x.mean(1), dim=-1)


def one_sided(queries: Tensor, passages: Tensor) -> Tensor:
    """The loss of dense retrieval: passages are the queries' own, then hard negatives."""
    return clipscale.contrastive_loss(queries, passages, 20.0, objective="softmax_image")


def figure1(settings: SimpleNamespace) -> Rows:
    torch.manual_seed(0)
    encoder = TextEncoder(1000, 128, 4)
    chunk, most = settings.chunk, max(counts(settings.batches))
    tokens = torch.randint(1000, (2, most, 32))
    cache = clipscale.GradCache([encoder, encoder], one_sided, chunks=chunk)

    def whole(batch: int, checkpoints: bool = False) -> None:
        encoder.checkpoints = checkpoints
        one_sided(encoder(tokens[0, :batch]), encoder(tokens[1, :batch])).backward()
        encoder.checkpoints = False

    def accumulated(batch: int) -> None:
        for start in range(0, batch, chunk):
            rows = slice(start, start + chunk)
            (one_sided(encoder(tokens[0, rows]), encoder(tokens[1, rows])) * chunk / batch).backward()

    updates: dict[str, Callable[[int], Any]] = {
        "one graph": whole,
        "gradient cache": lambda batch: cache.step(tokens[0, :batch], tokens[1, :batch]),
        "accumulation": accumulated,
        "activation checkpointing": lambda batch: whole(batch, checkpoints=True),
    }
    rows: list[Row] = []
    for batch in counts(settings.batches):
        times: dict[str, list[float]] = {name: [] for name in updates}
        gradients = {}
        for _ in range(settings.repeats + 1):  # interleaved; the first is not counted
            for name, update in updates.items():
                encoder.zero_grad()
                start = time.perf_counter()
                update(batch)
                times[name].append(time.perf_counter() - start)
                gradients[name] = torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
        exact = gradients["one graph"]
        for name in updates:
            error = ((gradients[name] - exact).norm() / exact.norm()).item()
            seconds = median(times[name][1:])
            rows.append({"batch": batch, "way": name, "s": seconds, "error": error})
            rows[-1]["of"] = seconds / next(row["s"] for row in rows if row["batch"] == batch)
    return rows, {
        "batch": lambda row: str(row["batch"]),
        "update by": lambda row: row["way"],
        "s": lambda row: f"{row['s']:.3f}",
        "of one graph's": lambda row: f"{row['of']:.2f}",
        "error of the gradient": lambda row: f"{row['error']:.0e}",
    }


def dpr(settings: SimpleNamespace) -> Rows:
    """Passages are bags of words of a topic; a query has a few of its passage's; a hard negative is of its topic."""
    torch.manual_seed(0)
    topics, each, length = 32, 16, 24
    words = torch.randint(1000, (topics, 60))
    passages = torch.stack([words[i // each][torch.randint(60, (length,))] for i in range(topics * each)])
    encoders = [TextEncoder(1000, 128, 2), TextEncoder(1000, 128, 2)]
    cache = clipscale.GradCache(encoders, one_sided, chunks=[16, 8])
    optimizer = torch.optim.AdamW([p for encoder in encoders for p in encoder.parameters()], lr=1e-3)

    def queries_of(rows: Tensor) -> Tensor:
        return torch.stack([passages[i][torch.randperm(length)[:8]] for i in rows.tolist()])

    def top1() -> float:
        generator = torch.get_rng_state()
        torch.manual_seed(1)
        asked = torch.randperm(len(passages))[:256]
        with torch.no_grad():
            nearest = (encoders[0](queries_of(asked)) @ encoders[1](passages).T).argmax(1)
        torch.set_rng_state(generator)
        return (nearest == asked).float().mean().item()

    rows = []
    for step in range(settings.steps + 1):
        if step % max(1, settings.steps // 4) == 0:
            rows.append({"step": step, "top1": top1()})
        own = torch.randperm(len(passages))[:128]
        hard = own // each * each + (own + torch.randint(1, each, own.shape)) % each
        batch = queries_of(own), passages[torch.cat([own, hard])]
        optimizer.zero_grad()
        loss = cache.step(*batch)
        if step == 0:
            split = [p.grad.clone() for encoder in encoders for p in encoder.parameters() if p.grad is not None]
            optimizer.zero_grad()
            one_sided(*(encoder(x) for encoder, x in zip(encoders, batch, strict=True))).backward()
            whole = [p.grad for encoder in encoders for p in encoder.parameters() if p.grad is not None]
            rows[0]["error"] = max(((a - b).norm() / b.norm()).item() for a, b in zip(split, whole, strict=True))
        optimizer.step()
        rows[-1]["loss"] = loss.item()
    return rows, {
        "step": lambda row: str(row["step"]),
        "top-1 of 512 passages": lambda row: f"{row['top1']:.1%}",
        "loss before the next row": lambda row: f"{row['loss']:.3f}",
        "gradient against one graph": lambda row: f"{row['error']:.0e}",
    }


# ---- EfficientDDP ----


def symmetric(scores: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


class GatherWithGradient(torch.autograd.Function):
    """All ranks' features; backward, the sum of all ranks' gradients of the own ones."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return gathered(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def with_gradient(own: Tensor) -> Tensor:
    features: Tensor = GatherWithGradient.apply(own)
    return features


def naive_gather(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """All features without gradients but the rank's own, the whole matrix on every rank."""
    whole = []
    for own in (u, v):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.detach())
        parts[dist.get_rank()] = own
        whole.append(torch.cat(parts))
    return symmetric(scale * whole[0] @ whole[1].T, torch.arange(len(whole[0])))


def local_rows(u: Tensor, v: Tensor, scale: Tensor, *, gradients: bool) -> Tensor:
    """The rank's rows against all columns, as open_clip's local loss; `gradients`: reach other ranks' features."""
    if dist.get_world_size() == 1:  # open_clip gathers nothing then
        return symmetric(scale * u @ v.T, torch.arange(len(u)))
    others = [with_gradient(own) if gradients else gathered(own) for own in (u, v)]
    labels = torch.arange(len(u)) + dist.get_rank() * len(u)
    return (F.cross_entropy(scale * u @ others[1].T, labels) + F.cross_entropy(scale * v @ others[0].T, labels)) / 2


def gathered(own: Tensor) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    return torch.cat(parts)


def whole_rows(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The whole matrix on every rank, gathered with gradients."""
    whole = with_gradient(u), with_gradient(v)
    return symmetric(scale * whole[0] @ whole[1].T, torch.arange(len(whole[0])))


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "naive gather": naive_gather,
    "local loss": lambda u, v, scale: local_rows(u, v, scale, gradients=False),
    "gather with gradient, whole loss (all-reduce)": whole_rows,
    "gather with gradient, local loss (reduce-scatter)": lambda u, v, scale: local_rows(u, v, scale, gradients=True),
    "clipscale, times the ranks": lambda u, v, scale: clipscale.contrastive_loss(u, v, scale) * dist.get_world_size(),
}


def gradient_of(loss: Callable[..., Tensor], rows: slice) -> Tensor:
    """Returns the gradient of two linear towers and a scale in float64, on these rows of 32 pairs."""
    torch.manual_seed(0)
    pairs = torch.randn(2, 32, 24, dtype=torch.float64)
    towers = [nn.Linear(24, 16, bias=False, dtype=torch.float64) for _ in range(2)]
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    u, v = (F.normalize(tower(x[rows]), dim=-1) for tower, x in zip(towers, pairs, strict=True))
    loss(u, v, scale).backward()
    parameters = [scale, *(p for tower in towers for p in tower.parameters())]
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def rank_of(rank: int, size: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    local = 32 // size
    gradients = {}
    for name, loss in LOSSES.items():
        gradient = gradient_of(loss, slice(rank * local, (rank + 1) * local))
        dist.all_reduce(gradient)  # DDP averages
        gradients[name] = gradient / size
    if rank == 0:
        torch.save(gradients, out)
    dist.destroy_process_group()


def discrepancy(settings: SimpleNamespace) -> Rows:
    exact = gradient_of(lambda u, v, scale: symmetric(scale * u @ v.T, torch.arange(32)), slice(32))
    rows = []
    for size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            start_processes(rank_of, (size, f"{folder}/store", f"{folder}/out"), size, start_method="spawn")
            gradients = torch.load(f"{folder}/out")
        for name, gradient in gradients.items():
            towers, theirs = gradient[1:], exact[1:]
            length = (towers.norm() / theirs.norm()).item()
            error = ((towers - theirs).norm() / theirs.norm()).item()
            turned = 1 - F.cosine_similarity(towers, theirs, 0).item()
            scale = ((gradient[0] - exact[0]).abs() / exact[0].abs()).item()
            rows.append(
                {"name": name, "ranks": size, "error": error, "length": length, "turned": turned, "scale": scale}
            )
    return rows, {
        "ranks": lambda row: str(row["ranks"]),
        "loss": lambda row: row["name"],
        "towers' gradient: relative error": lambda row: f"{row['error']:.1e}",
        "its length": lambda row: f"{row['length']:.3f}",
        "1 - cosine": lambda row: f"{abs(row['turned']):.0e}",
        "scale's gradient: relative error": lambda row: f"{row['scale']:.1e}",
    }
