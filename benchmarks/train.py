"""Samples a second of whole training programs, from shards of JPEGs to updated weights, beside open_clip's trainer.

    python benchmarks/train.py
    python benchmarks/train.py device=cuda model=vit-b16 batch=8k side=256 precision=bf16 workers=16 methods=clipscale

Each program trains with its own defaults on the same shards, in a process of its own, in `repeats` rounds. The figures
are medians over the steps after WARM.

    clipscale          `clipscale train`
    clipscale-twice    with cache.keep=none: every chunk is encoded twice
    open_clip          open_clip_train.main, one graph over the whole batch, from files and a CSV list: its reader of
                       shards does not fit webdataset 1.0
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from data import photograph, write_shards
from measure import Row, main, model_preset

from clipscale.common.errors import UserError
from clipscale.common.units import format_count
from clipscale.config.setting import flatten

DEFAULTS = {
    "model": "small",  # a preset of conf/model, or SMALL
    "batch": 256,
    "side": 64,  # of the pictures in the shards, in pixels
    "steps": 16,
    "workers": 1,
    "precision": "fp32",  # or bf16 (autocast)
    "methods": "clipscale,clipscale-twice,open_clip",
    "device": "auto",
    "repeats": 3,
    "out": "runs/bench",
}
METHODS = {"clipscale": [], "clipscale-twice": ["cache.keep=none"], "open_clip": []}
# Steps before the first that counts: the first measures graphs.
WARM = 4
# Distinct pictures in the shards.
PICTURES = 256
SMALL = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 64, "patch_size": 8, "layers": 6, "width": 256, "head_width": 64},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    """Raises UserError for a method that is none."""
    common = {key: value for key, value in vars(settings).items() if key not in ("methods", "out", "repeats")}
    jobs = []
    for number in range(settings.repeats):
        for method in settings.methods.split(","):
            if method not in METHODS:
                raise UserError(f"methods={method}: unknown; there are {', '.join(METHODS)}")
            jobs.append({"method": method, "round": number, **common})
    return f"train-{settings.device}", jobs


def measure(method: str, **settings: Any) -> list[Row]:
    options = SimpleNamespace(**settings)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        samples = options.steps * options.batch
        files = [photograph(options.side, seed) for seed in range(PICTURES)]
        if method == "open_clip":
            return [open_clip(place, files, samples, options)]
        shards = write_shards(place, files, 2 * options.workers, samples)
        return [clipscale(place, shards, samples, options, METHODS[method])]


def called(*words: str) -> str:
    """The output of a program with its own choice of threads. Raises RuntimeError with its last line."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=variables)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
        raise RuntimeError((lines or ["no message"])[-1])
    return done.stdout + done.stderr


def clipscale(place: Path, shards: str, samples: int, options: SimpleNamespace, changes: list[str]) -> Row:
    """`clipscale train`, and what `clipscale plan` predicts of it on a GPU."""
    model = [f"model={options.model}"]
    if options.model == "small":
        model = ["model=tiny", *(f"model.architecture.{key}={value}" for key, value in flatten(SMALL))]
    run = place / "run"
    words = [f"run={run}", *model, f"data.train={shards}", f"batch={options.batch}", f"samples={samples}"]
    words += [f"data.workers={options.workers}", f"precision={options.precision}", f"device={options.device}"]
    called("-m", "clipscale", "train", *words, "plan=false", *changes)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "step_s" in record][WARM:]

    def middle(name: str) -> float | None:
        values = [step[name] for step in steps if step[name] is not None]
        return median(values) if values else None

    row: Row = {"samples_per_s": middle("samples_per_s_wall"), "device_samples_per_s": middle("samples_per_s")}
    row |= {"wait": middle("data_wait_frac"), "mfu": middle("mfu"), "host_bytes": middle("host_rss_bytes")}
    row |= {"peak_bytes": middle("mem_peak_bytes"), "step_s": middle("step_s")}
    if options.device == "cuda":
        predicted = json.loads(
            called("-m", "clipscale", "plan", *words[1:], *changes, "json=true").rpartition("\n}")[0] + "\n}"
        )
        row["plan"] = {key: predicted[key] for key in ("step_s", "least_step_s", "peak_bytes", "host_bytes")}
    return row


def open_clip(place: Path, files: list[bytes], samples: int, options: SimpleNamespace) -> Row:
    """open_clip's own program. Its step times contain the waiting for data."""
    name = "small"
    if options.model != "small":
        name = model_preset(options.model).name
    (place / "small.json").write_text(json.dumps(SMALL))
    for number, data in enumerate(files):
        (place / f"{number}.jpg").write_bytes(data)
    rows = [f"{place}/{i % len(files)}.jpg\ta photograph of thing {i} on a table" for i in range(samples)]
    (place / "list.csv").write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
    words = ["--model", name, "--train-data", str(place / "list.csv"), "--dataset-type", "csv"]
    words += ["--batch-size", str(options.batch), "--epochs", "1"]
    words += ["--workers", str(options.workers), "--device", options.device, "--log-every-n-steps", "1"]
    words += ["--precision", "fp32" if options.precision == "fp32" else "amp_bf16", "--logs", str(place / "logs")]
    program = f"import open_clip; open_clip.add_model_config({str(place / 'small.json')!r}); "
    program += f"from open_clip_train.main import main; main({words!r})"
    printed = called("-c", program)
    seconds = [float(text) for text in re.findall(r"Batch \(t\): ([\d.]+)", printed)][WARM:]
    return {"step_s": median(seconds), "samples_per_s": options.batch / median(seconds)}


def compare(rows: list[Row]) -> None:
    """A method's median rate over open_clip's."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if "samples_per_s" in row:
            rates.setdefault(row["method"], []).append(row["samples_per_s"])
    for row in rows:
        if row["method"] in rates and "open_clip" in rates:
            row["ratio"] = median(rates[row["method"]]) / median(rates["open_clip"])


COLUMNS = {
    "method": lambda row: row["method"],
    "round": lambda row: str(row["round"]),
    "batch": lambda row: format_count(row["batch"]),
    "samples/s": lambda row: f"{row['samples_per_s']:,.1f}",
    "on the device": lambda row: f"{row['device_samples_per_s']:,.1f}",
    "waiting": lambda row: f"{row['wait']:.1%}",
    "MFU": lambda row: f"{row['mfu']:.1%}",
    "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:,.0f}",
    "planned s": lambda row: f"{row['plan']['step_s']:.2f}",
    "step s": lambda row: f"{row['step_s']:.2f}",
    "to open_clip": lambda row: f"{row['ratio']:.2f}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, compare)
