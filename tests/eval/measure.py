"""Times the evaluation of a classification set against a plain loop over the same model, and on several processes.

    python -m tests.eval.measure model=ViT-B-32 images=96 rounds=3 ranks=2

The plain loop is what a notebook has: open_clip's model and transform, one picture after another, one batch after another. Each process
has one thread for the model. The kinds alternate; the table has medians and the ratios within a round.
"""

import io
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import open_clip
import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.transform import image_transform
from PIL import Image

from clipscale.config.sections import EvalConfig, ModelConfig
from clipscale.distributed import World
from clipscale.eval.run import evaluate
from clipscale.models.towers import build_model
from clipscale.report.table import TextTable
from tests.eval.sets import write_shards
from tests.ranks import run_ranks

BATCH, CLASSES, TEMPLATE = 32, 16, "a photo of {c}."


def jpeg(number: int) -> bytes:
    """A picture of 400 x 300 pixels that compresses like a photograph."""
    coarse = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((400, 300), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def image_set(root: Path, count: int) -> Path:
    members = [[(f"{i:05d}.cls", str(i % CLASSES).encode()), (f"{i:05d}.jpg", jpeg(i))] for i in range(count)]
    names = "".join(f"thing {i}\n" for i in range(CLASSES))
    files = {"classnames.txt": names, "zeroshot_classification_templates.txt": f"{TEMPLATE}\n"}
    return write_shards(root, [[member for sample in members for member in sample]], files)


def ours(rank: int, ranks: int, name: str, sets: list[str]) -> float:
    """Seconds of an evaluation, the classes' embeddings included. The model is built before."""
    torch.set_num_threads(1)
    model, config = build_model(ModelConfig(name=name)), EvalConfig(sets=sets, batch=BATCH, workers=1)
    if ranks > 1:
        dist.barrier()
    begun = time.perf_counter()
    evaluate(model, config, World(rank, ranks, torch.device("cpu")))
    return time.perf_counter() - begun


@torch.no_grad()
def plain(name: str, pictures: list[bytes]) -> float:
    """The same by a loop over open_clip's model."""
    torch.set_num_threads(1)
    model, tokenizer = open_clip.create_model(name).eval(), open_clip.get_tokenizer(name)
    transform = image_transform(224, is_train=False)
    begun = time.perf_counter()
    texts = [tokenizer([TEMPLATE.format(c=f"thing {i}")]) for i in range(CLASSES)]
    classes = F.normalize(torch.cat([model.encode_text(text) for text in texts]), dim=-1)
    for start in range(0, len(pictures), BATCH):
        pixels = [transform(Image.open(io.BytesIO(data))) for data in pictures[start : start + BATCH]]
        (F.normalize(model.encode_image(torch.stack(pixels)), dim=-1) @ classes.T).topk(5)
    return time.perf_counter() - begun


def main(words: list[str]) -> None:
    given: dict[str, Any] = {"model": "ViT-B-32", "images": 192, "rounds": 3, "ranks": 2}
    given |= dict(word.split("=") for word in words)
    name, count, ranks = given["model"], int(given["images"]), int(given["ranks"])
    with tempfile.TemporaryDirectory() as folder:
        sets = [str(image_set(Path(folder) / "set", count))]
        kinds = {
            "plain loop": lambda: plain(name, [jpeg(i) for i in range(count)]),
            "1 process": lambda: run_ranks(ours, 1, name, sets, timeout_s=600)[0],
            f"{ranks} processes": lambda: max(run_ranks(ours, ranks, name, sets, timeout_s=600)),
        }
        seconds = {kind: list[float]() for kind in kinds}
        for _ in range(int(given["rounds"])):
            for kind, work in kinds.items():
                seconds[kind].append(work())
    first = seconds["plain loop"]
    rows = [
        [kind, f"{count / median(s):.2f}", f"{median(a / b for a, b in zip(first, s)):.2f}"]
        for kind, s in seconds.items()
    ]
    print(TextTable([f"{name}, {count} images", "images/s", "of the plain loop's"], [rows]).markdown())


if __name__ == "__main__":
    main(sys.argv[1:])
