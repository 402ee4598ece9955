"""Zero-shot accuracy and retrieval after training on pictures that others made, beside open_clip's own trainer.

    python benchmarks/real.py fashion=/usr/share/datasets/fashion-mnist emoji=node_modules

Each program trains the same small model from random weights on the same pairs: equal samples, batch, schedule,
optimizer and augmentation, one thread and one data worker, a seed each round. `clipscale eval` measures all weights.

    fashion    Fashion-MNIST's four files, as Debian's dataset-fashion-mnist has them: 60,000 pictures to train on,
               captioned by their class and a template, and the accuracy on the 10,000 of its test part
    emoji      the folder of the npm packages of MAKERS: drawings and their names; recall on a tenth, held out by
               `clipscale data pack`

Nothing is fetched. `work` keeps the pictures, their CSV and the shards.
"""

import csv
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import Row, counts, main
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.setting import flatten
from clipscale.tools.data.pack.pairs import pairs_of, tables_of
from clipscale.tools.data.pack.parts import held_out
from clipscale.tools.data.pack.places import read

DEFAULTS = {
    "fashion": "",  # the folder of its files; empty: not measured
    "emoji": "",
    "epochs": "1,12",  # of fashion and of emoji, each of whole batches
    "batch": 256,
    "methods": "clipscale,open_clip,clipscale-2x,clipscale-4x",
    "seeds": 3,
    "work": "runs/real",
    "out": "runs/bench",
}
# A method -> the factor of the batch, whose root is the factor of the rate. A larger batch has no more memory: it is
# encoded in chunks of `batch`, whose graphs are not kept.
METHODS = {"clipscale": 1, "open_clip": 1, "clipscale-2x": 2, "clipscale-4x": 4}
RATE = 1e-3
CLASSES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
TEMPLATES = ["a photo of a {c}", "a small grey picture of a {c}", "a {c} in a shop", "the {c} is for sale", "{c}"]
MAKERS = [
    "emoji-datasource-google/img/google/64/*.png",
    "emoji-datasource-twitter/img/twitter/64/*.png",
    "@lobehub/fluent-emoji-3d/assets/*.webp",
]
NAMES = "emoji-datasource-google/emoji.json"
# Held-out emoji, in per cent.
HOLDOUT = 10
# The sides of a picture and of a patch, in pixels.
SIDES = {"fashion": (28, 7), "emoji": (32, 8)}
TEXT = {"context_length": 24, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 2}


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    """Makes the sets that are not there yet. Raises UserError for folders and methods that are none."""
    sources = {name: Path(getattr(settings, name)).expanduser() for name in SIDES if getattr(settings, name)}
    methods = settings.methods.split(",")
    work = Path(settings.work).expanduser().absolute()
    if not sources or not {*methods} <= {*METHODS}:
        raise UserError(f"give fashion=FOLDER or emoji=FOLDER, and methods= of {', '.join(METHODS)}")
    for name, source in sources.items():
        if not (work / name / "shards/holdout/sizes.json").is_file():
            prepare(source, work / name)
    epochs = dict(zip(SIDES, counts(settings.epochs)))
    cases = product(range(settings.seeds), sources, methods)
    common = {"batch": settings.batch, "work": str(work)}
    return "real", [
        {"set": name, "method": m, "seed": seed, "epochs": epochs[name]} | common for seed, name, m in cases
    ]


# ---- the pictures ----


def prepare(source: Path, folder: Path) -> None:
    """Write pictures, their CSV in random order, and the shards of `clipscale data pack`."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (image, caption) in enumerate({"fashion": fashion, "emoji": emoji}[folder.name](source, folder)):
        image.save(folder / f"pictures/{number:06d}.png")
        rows.append((f"pictures/{number:06d}.png", caption))
    random.Random(0).shuffle(rows)
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    called("-m", "clipscale", "data", "pack", f"{folder}/pairs.csv", f"out={folder}/shards", f"holdout={HOLDOUT}%")


def fashion(source: Path, folder: Path) -> Iterator[tuple[Image.Image, str]]:
    """The training part, and its captions. The test part becomes folders of classes."""
    for number, (pixels, label) in enumerate(idx_pairs(source, "t10k")):
        place = folder / "test" / CLASSES[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.png")
    (folder / "test" / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    for number, (pixels, label) in enumerate(idx_pairs(source, "train")):
        yield Image.fromarray(pixels), TEMPLATES[number % len(TEMPLATES)].format(c=CLASSES[label])


def idx_pairs(source: Path, part: str) -> Iterator[tuple[np.ndarray, int]]:
    """The pictures and labels of a part, from IDX files: heads of 16 and 8 bytes, then bytes."""
    pixels, labels = (
        np.frombuffer(gzip.decompress((source / f"{part}-{kind}-ubyte.gz").read_bytes()), np.uint8, offset=head)
        for kind, head in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return zip(pixels.reshape(-1, 28, 28), labels.tolist(), strict=True)


def emoji(source: Path, folder: Path) -> Iterator[tuple[Image.Image, str]]:
    """The drawings of each maker, on white, and their names. Skins of other colours are left out."""
    entries = json.loads((source / NAMES).read_text(encoding="utf-8"))
    names = {Path(entry["image"]).stem: entry["name"].lower() for entry in entries}
    for file in sorted(chain.from_iterable(map(source.glob, MAKERS))):
        if file.stem in names:
            drawing = Image.open(file).convert("RGBA").resize((64, 64))
            yield (
                Image.alpha_composite(Image.new("RGBA", drawing.size, "white"), drawing).convert("RGB"),
                names[file.stem],
            )


# ---- a run ----


def measure(set: str, method: str, seed: int, epochs: int, batch: int, work: str) -> list[Row]:
    """Train and evaluate. What is left of an epoch after whole batches is not trained on."""
    place = Path(work, set)
    factor = METHODS[method]
    table = place / "pairs.csv"
    every = pairs_of(table, tables_of(table, None), "")
    pairs = [pair for pair in every if not held_out(pair, read(pair.place), HOLDOUT / 100)]
    steps = epochs * (len(pairs) // batch)
    side, patch = SIDES[set]
    vision = {"image_size": side, "patch_size": patch, "layers": 4, "width": 128, "head_width": 32}
    sizes = {"embed_dim": 128, "vision_cfg": vision, "text_cfg": TEXT}
    model = ["model=tiny", f"model.name={set}", *(f"model.architecture.{key}={value}" for key, value in flatten(sizes))]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch)
        if method == "open_clip":
            (run / f"{set}.json").write_text(json.dumps(sizes))
            rows = [f"{place}/{pair.name}\t{pair.captions[0]}" for pair in pairs]
            (run / "list.csv").write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
            words = f"--model {set} --train-data {run}/list.csv --dataset-type csv --workers 1 --device cpu"
            words += f" --batch-size {batch} --epochs {epochs} --save-frequency {epochs} --seed {seed} --precision fp32"
            words += f" --lr {RATE} --beta1 0.9 --beta2 0.98 --eps 1e-6 --wd 0.2 --warmup {round(steps / 10)}"
            words += f" --logs {run} --name it --log-every-n-steps 100"
            add = f"import open_clip; open_clip.add_model_config('{run}/{set}.json')"
            spent = called("-c", f"{add}; from open_clip_train.main import main; main({words.split()!r})")
            weights = [*model, f"model.weights={run}/it/checkpoints/epoch_{epochs}.pt", f"out={run}/run"]
        else:
            words = f"run={run}/run data.train={place}/shards data.workers=1 device=cpu plan=false log.every=100"
            words += f" batch={factor * batch} samples={steps * batch} cache.chunk={batch} seed={seed} precision=fp32"
            words += f" optim.lr={RATE * factor**0.5} schedule.warmup=10% cache.keep={'none' if factor > 1 else 'auto'}"
            spent = called("-m", "clipscale", "train", *model, *words.split())
            weights = [f"run={run}/run"]
        sets = f"eval.sets=[{place}/shards/holdout{f',{place}/test' if set == 'fashion' else ''}]"
        called("-m", "clipscale", "eval", *weights, sets, "precision=fp32", "device=cpu")
        (file,) = run.glob("run/eval/*.json")
        results = json.loads(file.read_text())["results"]
    row: Row = {"samples": steps * batch, **spent}
    if "loss" in results["holdout"]:  # not of weights alone, which say no objective
        row["loss"] = results["holdout"]["loss"]
    if set == "fashion":  # its captions repeat, so that recalls say nothing
        return [row | {"top1": results["fashion/test"]["top1"]}]
    return [row | {name: results["holdout"][name] for name in ("image_to_text_r1", "text_to_image_r1")}]


def called(*words: str) -> Row:
    """What a program took, on one thread: seconds, of the processors too, and its largest process. Raises
    RuntimeError with its last line."""
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=variables)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.perf_counter() - began, "cpu_s": processor, "peak_mib": after.ru_maxrss / 1024}


def compare(rows: list[Row]) -> None:
    """Mean and standard deviation of the same set and method over the seeds."""
    for row in rows:
        same = [r for r in rows if (r["set"], r["method"], r["status"]) == (row["set"], row["method"], "ok")]
        row["over_seeds"] = {}
        if len(same) > 1:
            row["over_seeds"] = {
                key: (mean(r[key] for r in same), stdev(r[key] for r in same)) for key in SHOWN if key in row
            }


def shown(key: str, form: str) -> Any:
    return lambda row: format(row[key], form) if key in row else "-"


# Figures: their heads and forms in the table.
SHOWN = {
    "top1": ("top-1", ".1%"),
    "image_to_text_r1": ("image to text R@1", ".1%"),
    "text_to_image_r1": ("text to image R@1", ".1%"),
    "loss": ("held-out loss", ".3f"),
    "cpu_s": ("processor s", ".0f"),
    "wall_s": ("wall s", ".0f"),
    "peak_mib": ("largest process MiB", ",.0f"),
}
COLUMNS = {key: shown(key, "") for key in ("set", "method", "seed", "samples")}
COLUMNS |= {head: shown(key, form) for key, (head, form) in SHOWN.items()}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, compare)
