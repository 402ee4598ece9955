"""What `clipscale data select` finds of faults that are planted in the demo set, and what training gains from it.

    python benchmarks/selection.py out=docs/benchmarks
    python benchmarks/selection.py seeds=0 pairs=2k samples=4k

Of the pairs a fifth has the caption of another pair, and a tenth more are copies: the picture is encoded again, at a
lower quality. Each seed trains on all of it, selects with the features of that model
alone, and trains once more on the best of them, for as many samples.
"""

import io
import itertools
import json
import tempfile
from pathlib import Path
from random import Random
from types import SimpleNamespace

from demo import SCORES, called, results, scores_of
from measure import Row, counts, main
from PIL import Image
from pyarrow.parquet import read_table

from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.writer import shard_writer
from clipscale.tools.data.demo import render_demo
from clipscale.tools.data.demo_folder import evaluation_sets

DEFAULTS = {
    "seeds": "0,1,2",
    "pairs": 5000,
    "samples": "20k",
    "best": 0.8,
    "duplicates": "0.98,0.99,0.999",
    "out": "runs/bench",
}

# Begins the key of a copy; the key of its original follows.
COPY = "copy"


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    given = {key: value for key, value in vars(settings).items() if key not in ("seeds", "out")}
    return "select", [{"seed": seed, **given} for seed in counts(settings.seeds)]


def measure(seed: int, pairs: int, samples: str, best: float, duplicates: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        render_demo(folder / "demo", pairs)
        shuffled, copies = plant(folder / "demo", folder / "planted.tar")
        scores = {"all": trained_on(folder, "all", seed, samples)}
        called("embed", f"run={folder}/all", f"data={folder}/planted.tar", f"out={folder}/features")
        unfit = dropped(folder, f"best={best}")
        row: Row = {"shuffled": rates(len(unfit & shuffled), len(unfit), len(shuffled)), "copies": {}}
        for cosine in duplicates.split(","):
            gone = dropped(folder, f"duplicates={cosine}")
            once = [key for key in copies if (key in gone) != (key.removeprefix(COPY) in gone)]
            row["copies"][cosine] = rates(len(once), len(gone), len(copies))
        lines = [line for file in folder.glob("features/*.jsonl") for line in file.read_text().splitlines()]
        kept = {json.loads(line)["key"] for line in lines} - unfit
        (folder / "kept.txt").write_text("\n".join(sorted(kept)))
        scores["selected"] = trained_on(folder, "selected", seed, samples, f"data.only_keys={folder}/kept.txt")
    return [{**row, "kept": len(kept), "wrong": len(kept & shuffled) / len(kept), "scores": scores}]


def trained_on(folder: Path, run: str, seed: int, samples: str, *words: str) -> Row:
    """Train on what is planted, and return the scores of the demo's test sets."""
    common = (f"data.train={folder}/planted.tar", "experiment=demo", f"seed={seed}", f"samples={samples}")
    called("train", *common, "eval.sets=[]", f"run={folder}/{run}", *words)
    sets = ",".join(evaluation_sets(folder / "demo"))
    called("eval", f"run={folder}/{run}", f"eval.sets=[{sets}]")
    return scores_of(results(folder / run))


def dropped(folder: Path, *words: str) -> set[str]:
    """The keys of weight 0."""
    out = folder / f"{'-'.join(words)}.parquet"
    called("data", "select", f"{folder}/features", f"out={out}", *words)
    table = read_table(out).to_pydict()
    return {key for key, weight in zip(table["key"], table["weight"]) if weight == 0}


def rates(found: int, gone: int, planted: int) -> Row:
    return {"gone": gone, "precision": found / max(1, gone), "recall": found / planted}


def plant(demo: Path, out: Path) -> tuple[set[str], set[str]]:
    """Write the demo's pairs with faults. Returns the keys with another pair's caption, and those of the copies."""
    shards = sorted((demo / "train").glob("*.tar"))
    raws = [raw for shard in shards for raw in read_shard(str(shard), ReadFailure())]
    random = Random("faults")
    wrong = random.sample(range(len(raws)), len(raws) // 5)
    captions = {i: raws[i].members["txt"] for i in range(len(raws))}
    for here, there in itertools.pairwise([*wrong, wrong[0]]):
        captions[here] = raws[there].members["txt"]
    written: list[dict[str, str | bytes]]
    written = [{"__key__": raw.key, "jpg": raw.members["jpg"], "txt": captions[i]} for i, raw in enumerate(raws)]
    twice = random.sample(sorted(set(captions) - set(wrong)), len(raws) // 10)
    written += [
        {"__key__": f"{COPY}{raws[i].key}", "jpg": copied(raws[i].members["jpg"]), "txt": captions[i]} for i in twice
    ]
    random.shuffle(written)
    with shard_writer(out) as writer:
        for sample in written:
            writer.write(sample)
    keys = [str(sample["__key__"]) for sample in written]
    return {raws[i].key for i in wrong}, {key for key in keys if key.startswith(COPY)}


def copied(picture: bytes) -> bytes:
    """Encoded again, at a lower quality."""
    out = io.BytesIO()
    Image.open(io.BytesIO(picture)).save(out, "JPEG", quality=80)
    return out.getvalue()


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


COLUMNS = {
    "seed": lambda row: str(row["seed"]),
    "shuffled: precision, recall": lambda row: (
        f"{percent(row['shuffled']['precision'])}, {percent(row['shuffled']['recall'])}"
    ),
    "copies: cosine, precision, recall": lambda row: "; ".join(
        f"{cosine}: {percent(found['precision'])}, {percent(found['recall'])}"
        for cosine, found in row["copies"].items()
    ),
    "kept, of which shuffled": lambda row: f"{row['kept']}, {percent(row['wrong'])}",
    **{
        f"{head}: all, selected": lambda row, head=head: ", ".join(percent(of[head]) for of in row["scores"].values())  # type: ignore[misc]
        for head in SCORES
    },
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
