"""`clipscale train -m ...`: a run for every combination of values, each in its own folder, then one table.

The runs follow one another, or are distributed by a Hydra launcher plugin.
"""

import json
import math
import time
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from clipscale.cli import compose
from clipscale.config.parse import typed
from clipscale.config.redact import redacted, redacted_output
from clipscale.config.train import TrainConfig, check
from clipscale.errors import UserError
from clipscale.launch import local
from clipscale.report.table import TextTable, plain_console
from clipscale.terminal import message, say, say_all
from clipscale.units import run_folder, split, unused

RESULT = "result.json"
"""File in a job's folder with its outcome."""


def main(argv: Sequence[str]) -> int:
    """Run the sweep; the exit status is 1 if any job failed."""
    folder, rest = sweep_folder(argv)
    started = time.time()
    try:
        compose.run("train", rest, job, sweep_dir=str(folder))
    finally:
        results = finished(folder, started)
        if results:
            plain_console().print(table(results, folder))
    failed = sum("error" in result for result in results)
    if failed:
        say(f"error: {failed} of {len(results)} jobs failed", error=True)
    return 1 if failed or not results else 0


def sweep_folder(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """The sweep's folder, from `run=RUN` or the time, and the other arguments. Raises UserError for Hydra's own key for it."""
    names = [word.partition("=")[2] for word in argv if word.startswith("run=")]
    if any(word.startswith("hydra.sweep.") for word in argv):
        raise UserError("hydra.sweep: name the sweep's folder with run=NAME")
    if names and len(split(names[-1])) == 1:
        return run_folder(names[-1].strip("'\"")), [word for word in argv if not word.startswith("run=")]
    return unused(Path("runs") / f"{datetime.now():sweep-%Y%m%d-%H%M%S}"), list(argv)


def job(values: DictConfig) -> float:
    """Train one job in its own processes, so that its failure does not affect the next job.

    Writes RESULT to its folder. Returns the last loss, or NaN after a failure, as Hydra's optimising sweepers expect.
    """
    with redacted_output():
        return _job(values)


def _job(values: DictConfig) -> float:
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    record: dict[str, Any] = {"job": int(hydra.job.num), "name": folder.name}
    say("")
    say(f"job {record['job'] + 1}: {folder.name}")
    try:
        plain = compose.plain(values)
        plain["run"] = plain["run"] or str(folder)
        config = check(typed(TrainConfig, plain))
        local.make_ready(config, named=True)
        record |= local.run(config, isolated=True)
    except UserError as error:
        record["error"] = str(error)
    except local.WorkerError as error:
        say_all(error.details, error=True)
        record["error"] = str(error)
    except Exception as error:
        traceback.print_exc()
        record["error"] = f"{type(error).__name__}: {error}"
    if "error" in record:
        say(message(f"error: {record['error']}"), error=True)
    temporary = folder / (RESULT + ".tmp")
    temporary.write_text(json.dumps(redacted(record)) + "\n")
    temporary.replace(folder / RESULT)
    return float(record.get("loss", math.nan))


def finished(folder: Path, since: float) -> list[dict[str, Any]]:
    """The results of the jobs that ended after `since`, in order. Older ones belong to an earlier sweep of the same name."""
    files = [path for path in folder.glob(f"*/{RESULT}") if path.stat().st_mtime >= since]
    return sorted((json.loads(path.read_text()) for path in files), key=lambda record: record["job"])


def table(results: Sequence[dict[str, Any]], folder: Path) -> TextTable:
    """One row per job: steps, last loss, the main metrics of every evaluation set, and the error if it failed."""
    figures = list(dict.fromkeys(name for result in results for name in headline(result)))
    rows = [
        (
            result["name"],
            str(result.get("step", "")),
            f"{result['loss']:.4f}" if "loss" in result else "",
            *(f"{100 * headline(result)[name]:.1f}" if name in headline(result) else "" for name in figures),
            result.get("error", "done"),
        )
        for result in results
    ]
    heads = ("job", "steps", "loss", *figures, "outcome")
    return TextTable(heads, [rows], f"{folder}: {len(results)} jobs", left=("outcome",))


def headline(result: dict[str, Any]) -> dict[str, float]:
    """`SET METRIC` -> value, for the metrics that are usually compared."""
    wanted = ("top1", "image_to_text_r1", "text_to_image_r1")
    return {
        f"{name} {m}": metrics[m] for name, metrics in result.get("eval", {}).items() for m in wanted if m in metrics
    }
