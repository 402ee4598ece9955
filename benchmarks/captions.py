"""What training on sentences of long captions gives, where the fact that tells pictures apart stands in the third.

    python benchmarks/captions.py out=docs/benchmarks
    python benchmarks/captions.py seeds=0 pairs=2k samples=4k

Captions of the demo set get two sentences in front that say nothing of the picture, as captions of models begin. With
`data.captions=txt` the model's context ends before the third. The test sets, retrieval among them, are the demo's own,
with short captions. Each run trains for as many samples.
"""

import tempfile
from pathlib import Path
from random import Random
from types import SimpleNamespace

from demo import SCORES, called, results, scores_of
from measure import Row, counts, main

from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.writer import shard_writer
from clipscale.tools.data.demo import render_demo
from clipscale.tools.data.demo_folder import evaluation_sets

DEFAULTS = {"seeds": "0,1,2", "pairs": 5000, "samples": "20k", "out": "runs/bench"}
# The name of a row -> `data.captions`.
CAPTIONS = {"all of it": "txt", "a sentence": "txt@sentence", "later": "txt@later", "later, all": "[txt@later=1,txt=1]"}
KINDS = ("photograph", "picture", "image", "rendering", "view")
MOODS = ("calm", "plain", "quiet", "simple", "ordinary", "clear")


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    given = {"pairs": settings.pairs, "samples": settings.samples}
    return "captions", [{"seed": seed, "way": way, **given} for seed in counts(settings.seeds) for way in CAPTIONS]


def measure(seed: int, way: str, pairs: int, samples: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        render_demo(folder / "demo", pairs)
        lengthen(folder / "demo", folder / "long.tar")
        words = (
            f"data.train={folder}/long.tar",
            f"data.captions={CAPTIONS[way]}",
            f"seed={seed}",
            f"samples={samples}",
        )
        called("train", "experiment=demo", *words, "eval.sets=[]", f"run={folder}/run")
        called("eval", f"run={folder}/run", f"eval.sets=[{','.join(evaluation_sets(folder / 'demo'))}]")
        scores = scores_of(results(folder / "run"))
    return [{"captions": CAPTIONS[way], **scores}]


def lengthen(demo: Path, out: Path) -> None:
    """Write the demo's pairs with two sentences before each caption, of the same words for all pictures."""
    random = Random("sentences")
    with shard_writer(out) as writer:
        for shard in sorted((demo / "train").glob("*.tar")):
            for raw in read_shard(str(shard), ReadFailure()):
                kind, mood, other = random.choice(KINDS), *random.sample(MOODS, 2)
                text = (
                    f"This is a {mood} {kind} with a few coloured shapes that stand on a {other} ground of one colour. "
                )
                text += f"The {kind} is taken from the front, in an even light, and leaves a {mood} impression. "
                text += f"{raw.members['txt'].decode()}."
                writer.write({"__key__": raw.key, "jpg": raw.members["jpg"], "txt": text.encode()})


COLUMNS = {
    "seed": lambda row: str(row["seed"]),
    "data.captions": lambda row: f"`{row['captions']}`",
    **{head: lambda row, head=head: f"{row[head]:.1%}" for head in SCORES},  # type: ignore[misc]
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
