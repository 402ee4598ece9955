"""What the demo reaches with each of several seeds, and how long its training takes.

    python benchmarks/demo.py out=docs/benchmarks
    python benchmarks/demo.py seeds=0,1 samples=20k runs=FOLDER
    python benchmarks/demo.py beside=runs/demo

Renders the demo set if it is not there, trains as `make demo` does and evaluates by `clipscale eval`. A run that `runs`
has already is evaluated again. The README gives the range of the seeds: rounding, which differs with threads and
processor, moves a score as a seed does. `beside` prints a run's scores beside the recorded range.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from words import Row, counts

from clipscale.cli.compose import compose_settings
from clipscale.cli.words import overrides_of
from clipscale.tools.data.demo_folder import user_folder

DEFAULTS = {"seeds": "0,1,2,3,4", "samples": "56k", "runs": "runs/seeds", "out": "runs/bench"}
RECORD = Path(__file__).parents[1] / "docs/benchmarks/demo.json"
# Heads of the table -> set and metric.
SCORES = {
    "objects": ("objects", "top1"),
    "unseen": ("unseen", "top1"),
    "image to text R@1": ("retrieval", "image_to_text_r1"),
    "text to image R@1": ("retrieval", "text_to_image_r1"),
}


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    settings.preset = preset()
    seeds = counts(settings.seeds)
    return "demo", [{"seed": seed, "samples": settings.samples, "runs": settings.runs} for seed in seeds]


def preset() -> Row:
    """All settings that `experiment=demo` composes. The demo set's paths begin with the name of its folder."""
    composed = asdict(compose_settings("train", overrides_of("train", ["experiment=demo"])[1]))
    return dict(json.loads(json.dumps(composed).replace(f"{user_folder().parent}/", "")))


def measure(seed: int, samples: str, runs: str) -> list[Row]:
    run = Path(runs, f"{samples}-{seed}")
    called("data", "demo")
    called("train", "experiment=demo", f"run={run}", f"seed={seed}", f"samples={samples}")
    called("eval", f"run={run}")
    env = json.loads((run / "env.json").read_text())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    wall_s = last["time"] - datetime.fromisoformat(env["time"]).timestamp()
    return [{"wall_s": wall_s, "last_loss": last["loss"], "commit": env["commit"], "results": results(run)}]


def results(run: Path) -> Row:
    """Returns the results of the run's last evaluation."""
    newest = max((run / "eval").glob("*.json"), key=lambda file: file.stat().st_mtime)
    return dict(json.loads(newest.read_text())["results"])


def scores_of(found: Row, marks: str = "") -> dict[str, float]:
    """The table's scores in the results of an evaluation. `marks` follows the name of a set, such as ` (size 32)`."""
    return {head: found[name + marks][metric] for head, (name, metric) in SCORES.items()}


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


def recorded() -> dict[str, tuple[float, float]]:
    """The range of each score over the recorded seeds."""
    return {head: (low, high) for head, (low, high) in json.loads(RECORD.read_text())["rows"][-1]["over_seeds"].items()}


def beside(run: Path) -> str:
    """A run's scores beside the recorded ranges, in per cent."""
    scores = scores_of(results(run))
    seeds = len(json.loads(RECORD.read_text())["rows"])
    lines = [f"{'':<18}  {run.name[:10]:>10}  {seeds} recorded seeds"]
    for head, (low, high) in recorded().items():
        lines.append(f"{head:<18}  {100 * scores[head]:>9.1f}%  {100 * low:.1f} to {100 * high:.1f} %")
    return "\n".join(lines)


COLUMNS = {
    "seed": lambda row: str(row["seed"]),
    "trained at": lambda row: str(row["commit"])[:8],
    "training, s": lambda row: f"{row['wall_s']:.0f}",
    **{
        head: lambda row, of=of: f"{100 * row['results'][of[0]][of[1]]:.1f} %"  # type: ignore[misc]
        for head, of in SCORES.items()
    },
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("beside="):
        print(beside(Path(sys.argv[1].removeprefix("beside="))))
    else:
        from measure import main  # loads torch

        main(DEFAULTS, plan, measure, COLUMNS, compare)
