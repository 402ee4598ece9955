"""Times the evaluation of a classification set, or the embedding of shards, against a plain loop over the same model, and on processes.

    python -m tests.eval.measure images=96 rounds=3 ranks=2
    python -m tests.eval.measure side=32 images=192 rounds=5
    python -m tests.eval.measure what=embed images=96 rounds=3

The plain loop is what a notebook has: open_clip's model and transform, one picture after another, one batch after another. Each process
has one thread for the model. Pictures of 32 pixels take next to nothing to decode. The kinds alternate; the table has medians, and
those of the ratios within a round. Processor time is summed over the processes: unlike the clock, it does not depend on what else runs.
"""

import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import open_clip
import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.transform import image_transform
from PIL import Image
from torch import Tensor, nn

from clipscale.config.data import DataConfig
from clipscale.config.sections import EvalConfig, ModelConfig, PrecisionConfig
from clipscale.config.tools import EmbedConfig
from clipscale.distributed.world import World
from clipscale.embed.encode import FeatureEncoder
from clipscale.embed.run import _Writer
from clipscale.eval.run import evaluate
from clipscale.models.towers import build_model
from clipscale.report.table import TextTable
from clipscale.step.precision import Precision
from tests.eval.sets import write_shards, write_tar
from tests.support.ranks import run_ranks

BATCH, CLASSES, TEMPLATE, SHARDS = 32, 16, "a photo of a {c}.", 4

Seconds = tuple[float, float]


@dataclass
class Measured:
    model: str = "ViT-B-32"
    what: str = "eval"
    images: int = 96
    side: int = 300
    rounds: int = 3
    ranks: int = 2


def jpeg(number: int, side: int) -> bytes:
    """A picture, a third wider than high, that compresses like a photograph."""
    coarse = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((4 * side // 3, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def image_set(root: Path, config: Measured) -> Path:
    members = [
        (f"{i:05d}.{end}", data)
        for i in range(config.images)
        for end, data in (("cls", str(i % CLASSES).encode()), ("jpg", jpeg(i, config.side)))
    ]
    names = "".join(f"thing {i}\n" for i in range(CLASSES))
    files = {"classnames.txt": names, "zeroshot_classification_templates.txt": f"{TEMPLATE}\n"}
    return write_shards(root, [members], files)


def shards(root: Path, config: Measured) -> Path:
    for number in range(SHARDS):
        members = [(f"{i:05d}.jpg", jpeg(i, config.side)) for i in range(number, config.images, SHARDS)]
        write_tar(root / f"{number:05d}.tar", members)
    return root


class Timer:
    """Seconds by the clock, and of this process's processor time, since it was made."""

    def __init__(self) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def read(self) -> Seconds:
        return time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]


def evaluation(rank: int, ranks: int, config: Measured, root: str) -> Seconds:
    """Of an evaluation, the classes' embeddings included. The model is built before."""
    torch.set_num_threads(1)
    model = build_model(ModelConfig(name=config.model))
    if ranks > 1:
        dist.barrier()
    timer = Timer()
    evaluate(model, EvalConfig(sets=[root], batch=BATCH, workers=1), World(rank, ranks, torch.device("cpu")))
    return timer.read()


def embedding(rank: int, ranks: int, config: Measured, root: str) -> Seconds:
    """Of a rank's share of the shards, their files included. The model is built before."""
    torch.set_num_threads(1)
    model, out = build_model(ModelConfig(name=config.model)).eval(), Path(tempfile.mkdtemp(dir=root))
    settings = EmbedConfig(features="image", batch=BATCH, threads=1, out=str(out), data=DataConfig())
    encoder = FeatureEncoder(settings, model, Precision(PrecisionConfig(), torch.device("cpu")), torch.device("cpu"))
    writer = _Writer(settings, encoder, out, {})
    if ranks > 1:
        dist.barrier()
    timer = Timer()
    for path in sorted(Path(root).glob("*.tar"))[rank::ranks]:
        writer.shard(str(path), f"{path.stem}.jsonl")
    return timer.read()


def features(model: nn.Module, pictures: list[bytes]) -> Iterator[Tensor]:
    transform = image_transform(224, is_train=False)
    for start in range(0, len(pictures), BATCH):
        pixels = [transform(Image.open(io.BytesIO(data))) for data in pictures[start : start + BATCH]]
        yield F.normalize(model.encode_image(torch.stack(pixels)), dim=-1)


@torch.no_grad()
def plain(config: Measured, root: str) -> Seconds:
    """The same by a loop over open_clip's model."""
    torch.set_num_threads(1)
    model, tokenizer = open_clip.create_model(config.model).eval(), open_clip.get_tokenizer(config.model)
    timer = Timer()
    if config.what == "eval":
        pictures = [jpeg(i, config.side) for i in range(config.images)]
        timer = Timer()
        texts = [tokenizer([TEMPLATE.format(c=f"thing {i}")]) for i in range(CLASSES)]
        classes = F.normalize(torch.cat([model.encode_text(text) for text in texts]), dim=-1)
        for found in features(model, pictures):
            (found @ classes.T).topk(5)
    for path in sorted(Path(root).glob("*.tar")):
        with tarfile.open(path) as tar:
            pictures = [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]
        np.save(path.with_suffix(".npy"), torch.cat([*features(model, pictures)]).half().numpy())
    return timer.read()


def main(words: list[str]) -> None:
    config = Measured(**{k: type(getattr(Measured, k))(v) for k, v in (word.split("=") for word in words)})
    with tempfile.TemporaryDirectory() as folder:
        root = str((image_set if config.what == "eval" else shards)(Path(folder) / "set", config))
        ours = evaluation if config.what == "eval" else embedding
        kinds = {
            "plain loop": lambda: [plain(config, root)],
            "1 process": lambda: run_ranks(ours, 1, config, root, timeout_s=600),
            f"{config.ranks} processes": lambda: run_ranks(ours, config.ranks, config, root, timeout_s=600),
        }
        seconds, cpu = ({kind: list[float]() for kind in kinds} for _ in range(2))
        for _ in range(config.rounds):
            for kind, work in kinds.items():
                walls, times = zip(*work())
                seconds[kind].append(max(walls))
                cpu[kind].append(sum(times))
    rows = []
    for kind, found in seconds.items():
        ratios = [
            f"{median(a / b for a, b in zip(seconds[other], found)):.2f}" for other in ("plain loop", "1 process")
        ]
        times = f"{median(cpu[kind]) / config.images:.3f}"
        rows.append([kind, f"{config.images / median(found):.2f}", *ratios, times])
    heads = [
        f"{config.what}, {config.model}, {config.images} images",
        "images/s",
        "of the plain loop's",
        "of one process's",
        "processor s an image",
    ]
    print(TextTable(heads, [rows]).markdown())


if __name__ == "__main__":
    main(sys.argv[1:])
