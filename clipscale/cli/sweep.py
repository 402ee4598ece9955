"""`clipscale train -m ...`: a run for every combination of values, each in its own folder, then one table.

The runs follow one another, or are distributed by a Hydra launcher plugin; with launch=slurm each is a Slurm job. The same command again
goes on with the sweep: jobs that are done, with the same settings, are neither trained nor evaluated again.
"""

import hashlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, NotRequired

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from clipscale.cli import compose
from clipscale.common import files
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.files import write_text
from clipscale.common.terminal import report, say
from clipscale.common.units import run_folder, split, unused
from clipscale.config.parse import typed
from clipscale.config.redact import redact, redacted, redacted_output
from clipscale.config.sections import JobConfig, LaunchConfig
from clipscale.config.train import TrainConfig, check, to_yaml
from clipscale.launch import local
from clipscale.launch.description import refuse_secrets
from clipscale.report.page import CSS
from clipscale.report.table import TextTable, plain_console

RESULT = "result.json"
"""File in a job's folder with its outcome."""
PAGE = "sweep.html"
"""File in the sweep's folder with the table."""


class Result(TypedDict):
    """What a job leaves."""

    job: int
    name: str
    settings: NotRequired[str]
    error: NotRequired[str]
    step: NotRequired[int]
    loss: NotRequired[float]
    eval: NotRequired[dict[str, dict[str, float | int]]]


SLURM = {
    "gpus_per_node": "${launch.procs}",
    "cpus_per_task": "${product:${job.cpus},${launch.procs}}",
    "timeout_min": "${product:${job.hours},60}",
    "signal_delay_s": "${product:${launch.grace_s},1}",
    "name": "clipscale",
}
"""A Slurm job's settings of Hydra's submitit plugin."""


def main(argv: Sequence[str]) -> int:
    """Run the sweep; the exit status is 1 if any job failed."""
    folder, rest = sweep_folder(argv)
    if any(word in ("launch=slurm", "job.scheduler=slurm") for word in rest):
        rest = [*rest, *slurm_overrides(rest)]
    earlier = written(folder)
    try:
        compose.run("train", rest, job, sweep_dir=str(folder))
    finally:
        hide_secrets(folder)
        results = finished(folder, earlier)
        if results:
            made = table(results, folder)
            plain_console().print(made)
            page(folder, made)
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


def slurm_overrides(argv: Sequence[str]) -> list[str]:
    """Arguments that let Hydra's submitit plugin start every run as a Slurm job. Raises UserError where the plugin is missing."""
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError("launch=slurm with -m needs Hydra's submitit plugin; pip install 'clipscale[slurm]'")
    refuse_secrets(argv)
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # which a run answers with a save, as it does SIGTERM
    given = dict(word.partition("=")[::2] for word in argv)
    device = {"gpus_per_node": "null"} if given.get("device") == "cpu" else {}
    options = {
        name.removeprefix("job.options."): value for name, value in given.items() if name.startswith("job.options.")
    }
    missing = {"cpus_per_task": "job.cpus", "timeout_min": "job.hours"}
    chosen = {name: value for name, value in (SLURM | device).items() if missing.get(name, name) in (*given, name)}
    values = {**chosen, **options}
    words = (f"hydra.launcher.{name}=" + (f"'{value}'" if "$" in value else value) for name, value in values.items())
    return ["hydra/launcher=submitit_slurm", *words]


@redacted_output()
def job(values: DictConfig) -> float:
    """Train one job in its own processes, so that its failure does not affect the next job.

    Writes RESULT to its folder. Returns the last loss, or NaN after a failure, as Hydra's optimising sweepers expect.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    record: dict[str, Any] = {"job": int(hydra.job.num), "name": folder.name}
    hide_secrets(folder.parent)
    say("")
    say(f"job {record['job'] + 1}: {folder.name}")
    try:
        plain = compose.plain(values)
        plain["run"] = plain["run"] or str(folder)
        config = check(typed(TrainConfig, plain))
        record["settings"] = settings_digest(config)
        if (done := already_done(folder, record["settings"])) and config.resume == "auto":
            say("done already, with the same settings")
            record = done | record
        else:
            record |= train(config)
    except (UserError, local.WorkerError) as error:
        record["error"] = str(error)
        report(error, getattr(error, "details", ""))
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
        report(record["error"], traceback.format_exc())
    files.write_text(folder / RESULT, json.dumps(redacted(record)) + "\n")
    return float(record.get("loss", math.nan))


def train(config: TrainConfig) -> dict[str, Any]:
    """A run in processes of its own. As a Slurm job that is asked to stop, it goes back into the queue. Raises UserError."""
    if config.job.nodes > 1:
        raise UserError(
            f"job.nodes={config.job.nodes}: a run of a sweep has one node; start runs on several without -m"
        )
    try:
        local.make_ready(config, named=True)
        return local.run(config, isolated=True)
    except (StoppedError, KeyboardInterrupt):
        number = os.environ.get("SLURM_JOB_ID")
        if number and config.job.scheduler == "slurm":
            say(f"saved; job {number} goes back into the queue")
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which submitit ignores
            subprocess.run(["scontrol", "requeue", number])
            time.sleep(600)  # Slurm ends this process; a result now would be this job's last
        raise


def hide_secrets(folder: Path) -> None:
    """Take the secrets out of the arguments that Hydra has written to the sweep's folder."""
    for file in folder.glob("*.yaml"):
        try:
            text = files.read_text(file)
        except (OSError, ValueError):  # none of Hydra's
            continue
        if (clean := redact(text)) != text:
            write_text(file, clean)


def settings_digest(config: TrainConfig) -> str:
    """Of all settings that make a run what it is: not of its folder, its processes and where they are started."""
    launch = LaunchConfig(parallel=config.launch.parallel)
    common = replace(config, run="", resume="", launch=launch, job=JobConfig())
    return hashlib.blake2b(to_yaml(common).encode(), digest_size=8).hexdigest()


def already_done(folder: Path, settings: str) -> dict[str, Any] | None:
    """The result of a job that ended without an error and had these settings."""
    record = read(folder / RESULT)
    return record if record and "error" not in record and record.get("settings") == settings else None


def read(path: Path) -> dict[str, Any] | None:
    """A job's outcome; None for a file that is none of ours."""
    with suppress(OSError, ValueError):
        record: Any = TypeAdapter(Result).validate_python(files.read_json(path), strict=True)
        return dict(record)
    return None


def page(folder: Path, made: TextTable) -> None:
    """Write the table as a page, beside the runs."""
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(folder.name)}</title>"
    files.write_text(folder / PAGE, f"{head}<style>{CSS}</style></head><body>{made.html()}</body></html>\n")


def written(folder: Path) -> dict[Path, int]:
    """The result files of a sweep, and when each was written."""
    found = {}
    for path in folder.glob(f"*/{RESULT}"):
        with suppress(OSError):  # a link to nothing
            found[path] = path.stat().st_mtime_ns
    return found


def finished(folder: Path, earlier: dict[Path, int]) -> list[dict[str, Any]]:
    """The results, in order, that are not those `earlier` of an earlier sweep of the same name. The clock may jump."""
    found = filter(None, (read(path) for path, at in written(folder).items() if earlier.get(path) != at))
    return sorted(found, key=lambda record: record["job"])


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
