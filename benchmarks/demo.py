"""What the demo reaches with each of several seeds, and how long its training takes.

    python benchmarks/demo.py out=docs/benchmarks
    python benchmarks/demo.py seeds=0,1,2 samples=70k

Renders the demo set if it is not there, trains as `make demo` does and evaluates by `clipscale eval`. The README gives
the range of the seeds: rounding, which differs with threads and processor, moves a score as a seed does.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from measure import Row, counts, main

DEFAULTS = {"seeds": "0,1,2", "samples": "70k", "out": "runs/bench"}
SCORES = {
    "objects": ("objects", "top1"),
    "unseen": ("unseen", "top1"),
    "image to text R@1": ("retrieval", "image_to_text_r1"),
    "text to image R@1": ("retrieval", "text_to_image_r1"),
}
"""Heads of the table -> set and metric."""


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    return "demo", [{"seed": seed, "samples": settings.samples} for seed in counts(settings.seeds)]


def measure(seed: int, samples: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        called("data", "demo")
        start = time.perf_counter()
        called("train", "experiment=demo", f"run={folder}/run", f"seed={seed}", f"samples={samples}")
        wall_s = time.perf_counter() - start
        called("eval", f"run={folder}/run")
        (file,) = Path(folder, "run/eval").glob("*.json")
        results = json.loads(file.read_text())["results"]
        last = json.loads(Path(folder, "run/metrics.jsonl").read_text().splitlines()[-1])
    return [{"wall_s": wall_s, "last_loss": last["loss"], "results": results}]


def called(*words: str) -> None:
    """Run a verb. Raises RuntimeError with its last line."""
    done = subprocess.run([sys.executable, "-m", "clipscale", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])


def compare(rows: list[Row]) -> None:
    """The lowest and the highest score of all seeds so far, in each row."""
    done = [row["results"] for row in rows if row["status"] == "ok"]
    for row in rows:
        row["over_seeds"] = {
            head: [min(r[name][metric] for r in done), max(r[name][metric] for r in done)]
            for head, (name, metric) in SCORES.items()
            if done
        }


COLUMNS = {
    "seed": lambda row: str(row["seed"]),
    "training, s": lambda row: f"{row['wall_s']:.0f}",
    **{
        head: lambda row, of=of: f"{100 * row['results'][of[0]][of[1]]:.1f} %"  # type: ignore[misc]
        for head, of in SCORES.items()
    },
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, compare)
