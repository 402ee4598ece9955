"""The demo with a captioner beside the contrast, and without, at equal samples: scores, and what its captions name.

    python benchmarks/captioner.py samples=8k out=docs/benchmarks
    python benchmarks/captioner.py seeds=0 samples=2k pictures=50 runs=FOLDER

Held-out pictures have two or three objects. Of each caption that the model writes for one, the first object is compared
with those of the picture; and, for chance, with those of the next picture. A run that `runs` has already is not trained
again.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from demo import SCORES, called, results
from measure import Row, counts, main

from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.models.captioner import WRITTEN_TOKENS, write_captions
from clipscale.tools.data.demo_folder import user_folder
from clipscale.tools.data.scenes import TABLES, ShapeClass
from clipscale.tools.trained_model import load_model

DEFAULTS = {"seeds": "0,1,2", "samples": "8k", "pictures": 200, "runs": "runs/captioner", "out": "runs/bench"}
EXPERIMENTS = ("demo", "demo-coca")
# A word of captions -> the colour or shape that it means.
WORDS = {TABLES["other_words"].get(word, word): word for word in (*TABLES["colours"], *TABLES["shapes"])}
WORDS |= {word: word for word in WORDS.values()}
AT_ONCE, SHOWN = 50, 8


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    given = {key: getattr(settings, key) for key in ("samples", "pictures", "runs")}
    seeds = counts(settings.seeds)
    return "captioner", [{"experiment": name, "seed": seed, **given} for name in EXPERIMENTS for seed in seeds]


def measure(experiment: str, seed: int, samples: str, pictures: int, runs: str) -> list[Row]:
    run = Path(runs, f"{experiment}-{seed}")
    if not (run / "eval").exists():
        called("data", "demo")
        words = (f"samples={samples}", f"seed={seed}", "data.workers=0")
        called("train", f"experiment={experiment}", *words, f"run={run}")
    row: Row = {"results": results(run), "trained_at": json.loads((run / "env.json").read_text())["commit"]}
    if experiment == "demo-coca":
        row |= captions_of(run, pictures)
    return [row]


def captions_of(run: Path, pictures: int) -> Row:
    """How many of the captions that a run writes name a colour, a shape, and an object; and the first of them."""
    held_out = [raw.members for raw in read_shard(f"{user_folder()}/retrieval/test/0.tar", ReadFailure())][:pictures]
    own = [members["txt"].decode().splitlines()[0] for members in held_out]
    written = captions_written(run, [members["png"] for members in held_out])
    others = own[1:] + own[:1]
    shown = [{"caption": a, "written": b} for a, b in zip(own[:SHOWN], written)]
    named, chance = ([names(*pair) for pair in zip(written, of)] for of in (own, others))
    return {"named": totals(named), "chance": totals(chance), "distinct": len({*written}), "written": shown}


@torch.no_grad()
def captions_written(run: Path, pictures: list[bytes]) -> list[str]:
    """The captions that the run's model writes for them, as its report shows."""
    model, _, _ = load_model(run)
    assert model.decoder is not None
    transform, written = model.eval_transform(), []
    length = min(WRITTEN_TOKENS, model.context_length)
    for start in range(0, len(pictures), AT_ONCE):
        pixels = torch.from_numpy(np.stack([transform(data) for data in pictures[start : start + AT_ONCE]]))
        _, tokens = model.image(pixels, with_tokens=True)
        rows = write_captions(model.text, model.decoder, tokens, model.tokenizer.bos_eos_ids, length)
        written += [model.tokenizer.text(row) for row in rows.tolist()]
    return written


def objects_of(caption: str) -> list[ShapeClass]:
    """The colour and the shape of each object that a caption names."""
    known = [WORDS.get(word, "") for word in re.findall(rf"\b(?:{'|'.join(WORDS)})\b|[a-z]+", caption.lower())]
    return [
        (colour, shape)
        for colour, shape in pairwise(known)
        if colour in TABLES["colours"] and shape in TABLES["shapes"]
    ]


def names(written: str, own: str) -> dict[str, bool]:
    """Whether the first object in the written caption has a colour, a shape, and both together of the picture's."""
    first, objects = objects_of(written)[:1], objects_of(own)
    colours, shapes = ({each[part] for each in objects} for part in (0, 1))
    return {
        "colour": any(colour in colours for colour, _ in first),
        "shape": any(shape in shapes for _, shape in first),
        "both": any(each in objects for each in first),
    }


def totals(named: list[dict[str, bool]]) -> dict[str, int]:
    return {"pictures": len(named), **{key: sum(each[key] for each in named) for key in named[0]}}


HEADS = SCORES | {
    "image to text R@5": ("retrieval", "image_to_text_r5"),
    "text to image R@5": ("retrieval", "text_to_image_r5"),
}
COLUMNS = {
    "run": lambda row: f"`experiment={row['experiment']}`",
    "seed": lambda row: str(row["seed"]),
    **{
        head: lambda row, of=of: f"{100 * row['results'][of[0]][of[1]]:.1f}"  # type: ignore[misc]
        for head, of in HEADS.items()
    },
    "caption loss": lambda row: f"{row['results']['retrieval']['caption_loss']:.2f}",
    **{
        f"a {part}" if part != "both" else part: lambda row, part=part: (  # type: ignore[misc]
            f"{row['named'][part]} ({row['chance'][part]})"
        )
        for part in ("colour", "shape", "both")
    },
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
