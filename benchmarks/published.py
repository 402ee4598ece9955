"""What published implementations of the contrastive loss keep on a GPU, and how fast published runs were.

    python benchmarks/published.py model=vit-b16 gpus=8 loss=infcl batch=800k precision=fp16 chunk=128 json=true
    python benchmarks/published.py of=time

`of=time`: the rates of published runs, beside those that the plan expects of a plain step (docs/plan.md).

`of=memory`: by what their own code keeps. A step with open_clip's own forward pass, whose graph a dry run measures,
and a gradient cache, under DDP and AdamW, as Inf-CL's code takes it. The loss runs outside of autocast, on float32
features. docs/benchmarks/published.md derives it.

N: batch, b: samples of one rank, D: feature width. All sizes in bytes of one GPU.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
import yaml
from measure import settings_of
from open_clip.model import CLIP, CustomTextCLIP

from clipscale.common.errors import UserError
from clipscale.common.hardware import hardware
from clipscale.common.text import did_you_mean
from clipscale.common.units import format_bytes
from clipscale.config.presets import conf_dir
from clipscale.tools.plan.memory_tracker import cuda_autocast, without_memory
from clipscale.tools.plan.step_memory import bytes_outside_torch
from clipscale.tools.plan.step_time import PLAIN_STEPS, plain_share

DEFAULTS = {
    "of": "memory",  # or time, of published runs, which takes no other setting
    "model": "vit-l14",  # a preset of conf/model, or open_clip's name
    "gpus": 8,  # in all
    "hardware": "a800-80g",
    "loss": "infcl",  # or clip, openclip, disco
    "batch": 32_768,
    "precision": "fp16",  # or bf16, fp32
    "chunk": 128,  # samples, of both towers
    "offload": "host",  # pixels wait in host memory, as Inf-CL's training program can have them for each loss; or none
    "json": "false",
}


# GPUs, method, offload -> GiB of the loss and at the peak at 32k, 64k, 128k, 256k, 1024k, where it fits. ViT-L/14.
TABLE_1 = {
    (8, "clip", False): ["16.67 46.40", "66.11 77.94", "", "", ""],
    (8, "openclip", False): ["2.27 43.97", "8.63 46.38", "33.64 51.23", "", ""],
    (8, "infcl", False): ["0.18 44.20", "0.36 46.63", "0.72 51.46", "1.45 61.13", ""],
    (8, "infcl", True): ["0.18 42.40", "0.36 42.49", "0.72 42.69", "1.45 43.07", "6.53 45.40"],
    (32, "clip", False): ["16.66 42.85", "66.11 75.52", "", "", ""],
    (32, "openclip", False): ["0.71 42.46", "2.45 43.06", "8.98 44.26", "34.35 46.71", ""],
    (32, "infcl", False): ["0.05 42.48", "0.09 43.08", "0.18 44.30", "0.35 46.71", "1.44 61.20"],
}


@dataclass(frozen=True)
class Run:
    """Published runs of a model on a kind of GPU."""

    model: str
    # As in clipscale/common/hardware.yaml.
    hardware: str
    gpus: str
    # Images a second of one GPU.
    published: str
    source: str


LAION = "LAION (arXiv 2212.07143, trained_models_info.csv)"
# open_clip's names, by which the rates of plain steps are known.
RUNS = [
    Run("ViT-B-32", "a100-80g", "128 and 344 A100", "850 and 634", LAION),
    Run("ViT-B-16", "a100-80g", "A100", "396", "LAION, as above"),
    Run("ViT-L-14", "a100-80g", "768 and 1,024 A100", "79 and 66 to 77", "LAION, as above"),
    Run("ViT-H-14", "a100-80g", "824 A100", "42", "LAION, as above"),
    Run("ViT-L-14", "v100-32g", "256 V100", "48", "OpenAI (arXiv 2103.00020): 12 days, 12.8B samples"),
    Run("ViT-B-16", "a100-80g", "8 A100", "271 to 417", "Chinese-CLIP"),
    Run("ViT-g-14", "a100-80g", "8 to 128 A100", "70 to 67", "NVIDIA NeMo"),
    Run("ViT-g-14", "h100-80g", "8 to 128 H100", "117 to 108", "NVIDIA NeMo"),
]


@dataclass(frozen=True)
class Method:
    """What a method's code keeps at the loss's peak, all float32."""

    # Matrices of scores with as many columns as the batch.
    matrices: int
    # Whether these have all of the batch's rows, or one rank's.
    all_rows: bool
    # Copies of all features of a tower.
    gathered: int
    # Copies of one rank's features of a tower.
    local: int


METHODS = {
    "clip": Method(matrices=4, all_rows=True, gathered=3, local=2),
    "openclip": Method(matrices=4, all_rows=False, gathered=2, local=4),
    "disco": Method(matrices=4, all_rows=False, gathered=2, local=4),
    "infcl": Method(matrices=0, all_rows=False, gathered=0, local=16),
}


@dataclass(frozen=True)
class Model:
    """What a model takes, of open_clip's own code."""

    width: int
    # Float32 pixels and int64 tokens of a sample.
    sample: int
    weights: int
    # The graph of a chunk of both towers at once, as in CLIP.forward.
    graph: int


def measured(name: str, chunk: int, precision: str) -> Model:
    """A dry run of one chunk of open_clip's model of that name. Raises UserError for a name it does not know."""
    file = conf_dir() / "model" / f"{name}.yaml"
    preset: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {"name": name}
    description: Any = preset.get("architecture") or open_clip.get_model_config(preset["name"])
    if description is None:
        raise UserError(f"model={name}: unknown{did_you_mean(name, open_clip.list_models())}")
    description.pop("custom_text", None)
    kind = CustomTextCLIP if "hf_model_name" in description["text_cfg"] else CLIP
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    with without_memory() as tracker, cuda_autocast():
        model = kind(**description)
        side = model.visual.image_size
        height, width = side if isinstance(side, tuple) else (side, side)
        pixels = torch.empty(chunk, 3, height, width)
        tokens = torch.zeros(chunk, model.context_length, dtype=torch.long)
        before = tracker.live
        with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
            outputs = model(pixels, tokens)
        graph = tracker.live - before
        features = outputs[0] if isinstance(outputs, tuple) else outputs["image_features"]
        weights = sum(p.nbytes for p in model.parameters())
    return Model(features.shape[1], 4 * 3 * height * width + 8 * model.context_length, weights, graph)


def figures(model: Model, method: Method, *, batch: int, gpus: int, chunk: int, offload: bool) -> dict[str, int]:
    """`published_loss_bytes`: the peak of the loss and its backward pass, beyond the chunks' features.

    `published_peak_bytes`: the memory in use at the step's peak, as the driver counts it.
    """
    local = batch // gpus
    rows = batch if method.all_rows else local
    scores = method.matrices * batch * rows
    loss = 4 * (scores + model.width * (method.gathered * batch + method.local * local))
    features = 2 * 4 * model.width * local
    waiting = min(chunk, local) if offload else local
    # Weights, AdamW's two moments and, with several ranks, DDP's buckets. Gradients are separate from the buckets.
    copies = 4 if gpus > 1 else 3
    start = copies * model.weights + model.sample * waiting + bytes_outside_torch(gpus)
    if chunk >= local:  # without a cache the loss is on top of the graph
        peak = start + model.graph + max(loss, model.weights)
    else:
        peak = start + features + max(loss, model.weights + model.graph + features)
    return {"published_loss_bytes": loss, "published_peak_bytes": peak}


def planned(run: Run) -> tuple[float, float]:
    """Images a second of one GPU that the plan expects of a plain step: the lowest, the highest."""
    gpu = hardware(run.hardware)
    forward = 1e9 * next(row["gflop"] for row in reversed(PLAIN_STEPS["images_per_s"]) if row["model"] == run.model)
    _, low, high = plain_share(run.model, gpu, forward)
    # A backward pass takes twice the operations of a forward pass.
    return low * gpu.peak("bf16") / (3 * forward), high * gpu.peak("bf16") / (3 * forward)


def times() -> str:
    """The table of docs/plan.md."""
    lines = [
        "| model | GPUs | published, images/s a GPU | plan of a plain step | source |",
        "|---|---|--:|--:|---|",
    ]
    for run in RUNS:
        low, high = planned(run)
        name = run.model.removeprefix("ViT-").replace("-", "/")
        lines.append(f"| {name} | {run.gpus} | {run.published} | {low:,.0f} to {high:,.0f} | {run.source} |")
    return "\n".join(lines)


def main(words: list[str]) -> dict[str, Any]:
    """The figures of the settings. Raises UserError."""
    settings = settings_of(DEFAULTS, words)
    if settings.of not in ("memory", "time"):
        raise UserError(f"of={settings.of}: known are memory, time")
    if settings.of == "time":
        print(times())
        return {}
    if settings.loss not in METHODS:
        raise UserError(f"loss={settings.loss}: known are {', '.join(METHODS)}{did_you_mean(settings.loss, METHODS)}")
    gpu = hardware(settings.hardware)
    chunk = min(settings.chunk, settings.batch // settings.gpus)
    model = measured(settings.model, chunk, settings.precision)
    sizes = figures(
        model,
        METHODS[settings.loss],
        batch=settings.batch,
        gpus=settings.gpus,
        chunk=settings.chunk,
        offload=settings.offload == "host",
    )
    fits = sizes["published_peak_bytes"] <= gpu.memory_bytes
    result = {"published": settings.loss} | sizes | {"published_fits": fits}
    if settings.json == "true":
        print(json.dumps(result, indent=1))
    else:
        loss, peak = (format_bytes(sizes[f"published_{name}_bytes"]) for name in ("loss", "peak"))
        print(f"{settings.loss} as published: loss {loss}, peak {peak}, {'fits' if fits else 'does not fit'}")
    return result


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
