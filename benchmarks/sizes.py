"""What `loss.sizes` gives: scores by the first numbers of the features, trained with it and without.

    python benchmarks/sizes.py out=docs/benchmarks
    python benchmarks/sizes.py seeds=0 samples=4k sizes=64

Both runs of a seed see the same samples in the same steps. The features of both are cut and compared as unit rows: an
evaluation takes its sizes from the run's settings, so that they are written into those of the run without.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import yaml
from demo import SCORES, called, results, scores_of
from measure import Row, counts, main

DEFAULTS = {"seeds": "0,1", "samples": "70k", "sizes": "16,32,64", "out": "runs/bench"}


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    given = {"sizes": counts(settings.sizes), "samples": settings.samples}
    return "sizes", [
        {"seed": seed, "trained": way, **given} for seed in counts(settings.seeds) for way in (True, False)
    ]


def measure(seed: int, trained: bool, sizes: list[int], samples: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        called("data", "demo")
        words = [f"seed={seed}", f"samples={samples}", f"run={run}"]
        called("train", "experiment=demo", *words, *([f"loss.sizes={sizes}"] if trained else []))
        if not trained:
            settings = yaml.safe_load((run / "config.yaml").read_text())
            settings["loss"]["sizes"] = sizes
            (run / "config.yaml").write_text(yaml.safe_dump(settings))
            called("eval", f"run={run}")
        found = results(run)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    share = sum(step["loss_s"] for step in steps) / sum(step["step_s"] for step in steps)
    rows = []
    for size in [*sizes, None]:
        marks = f" (size {size})" if size else ""
        rows.append({"size": size, "steps": len(steps), "loss_share": share, **scores_of(found, marks)})
    return rows


COLUMNS = {
    "seed": lambda row: str(row["seed"]),
    "`loss.sizes`": lambda row: f"`[{','.join(map(str, row['sizes']))}]`" if row["trained"] else "`[]`",
    "numbers": lambda row: str(row["size"] or "all"),
    **{head: lambda row, head=head: f"{row[head]:.1%}" for head in SCORES},  # type: ignore[misc]
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS)
