"""Whether a change leaves training as it was: short runs by this tree and by another commit, compared bit by bit.

    python benchmarks/golden.py commit=main
    python benchmarks/golden.py commit=HEAD~3 runs=plain,muon

Each run trains 1,024 pairs of the demo set on a CPU, one thread a process. Its losses and gradient norms are compared
as `metrics.jsonl` has them. `bf16` takes minutes on a CPU without instructions for it. Exit status: 0 all are equal,
1 one differs or did not run.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from itertools import zip_longest
from pathlib import Path

from words import settings_of

from clipscale.common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
COMMON = "experiment=demo plan=false eval.sets=[] samples=1k batch=64 cache.chunk=16 data.workers=0 device=cpu"
RUNS = {
    "plain": "",
    "sigmoid": "loss=siglip",
    "ring": "launch.procs=2 loss.exchange=ring",
    "bf16": "precision=bf16 cache.keep=20M",
    "zero3": "launch.procs=2 launch.parallel=zero3 loss.sizes=[32,64]",
    "adamw": "optim=adamw ema=0.9",
    "stages": "stages=[{samples:512,image_size:18},{samples:512,lr:1e-4}]",
    "captions": "data.captions_per_step=2",
    "captioner": "model=coca-tiny",
}
EQUAL = "bit-equal"
DEFAULTS = {"commit": "main", "runs": ",".join(RUNS)}


def curve(tree: Path, words: str, run: Path) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step of a run by the code in `tree`; none if it ends with an error."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "clipscale", "train", *COMMON.split(), *words.split(), f"run={run}"]
    done = subprocess.run(command, cwd=run.parent, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{run.name}: {done.stderr.strip()[-500:]}", file=sys.stderr)
        return []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def comparison(now: list[tuple[float, float]], before: list[tuple[float, float]]) -> str:
    if not now or not before:
        return "not run"
    differing = [step for step, (a, b) in enumerate(zip_longest(now, before), 1) if a != b]
    return f"differs from step {differing[0]}" if differing else EQUAL


def main(words: list[str]) -> bool:
    """Whether all runs are equal. Raises UserError."""
    settings = settings_of(DEFAULTS, words)
    names = settings.runs.split(",")
    if unknown := {*names} - {*RUNS}:
        raise UserError(f"runs={','.join(sorted(unknown))}: known are {', '.join(RUNS)}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        archive = ["git", "-C", str(ROOT), "archive", f"--output={other}.tar", settings.commit]
        if subprocess.run(archive).returncode:
            raise UserError(f"commit={settings.commit}: git does not know it")
        with tarfile.open(f"{other}.tar") as tar:
            tar.extractall(other, filter="data")
        for name in names:
            now, before = (
                curve(tree, RUNS[name], Path(folder) / f"{name}-{which}")
                for tree, which in ((ROOT, "now"), (other, "before"))
            )
            results.append(comparison(now, before))
            print(f"{name}: {results[-1]}", flush=True)
    return all(result == EQUAL for result in results)


if __name__ == "__main__":
    try:
        sys.exit(not main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
