"""`clipscale train -m ...`: a run for every combination of values, one after another, and a table of all.

The same command again goes on with the sweep: every run resumes from its newest checkpoint, and a complete one trains
no further.
"""

import math
import os
import re
import zlib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from clipscale.cli import compose
from clipscale.cli import train as cli_train
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.record import Record
from clipscale.common.terminal import report, say
from clipscale.common.units import run_folder, unused
from clipscale.config.train import TrainConfig, to_yaml
from clipscale.launch import local
from clipscale.log.table import TextTable, loss_title, plain_console, print_results


def main(name: str, line: Namespace) -> int:
    """Run the sweep; the exit status is 1 if any run failed.

    All combinations are composed and checked before the first one starts. Raises UserError.
    """
    if name != "train":
        raise UserError(f"{name} takes no -m; give one value for each setting")
    if local.under_torchrun():
        raise UserError("-m under torchrun would start the whole sweep in every rank; leave torchrun out")
    runs = {to_yaml(config): (words, config) for words, config in compose.combinations(line.words, line.config_dir)}
    combinations = [*runs.values()]  # those with equal settings once
    run = combinations[0][1].run
    folder = run_folder(run) if run else unused(Path("runs") / f"{datetime.now():sweep-%Y%m%d-%H%M%S}")
    configs = [replace(config, run=str(folder / folder_name(words))) for words, config in combinations]
    for config in configs:
        if line.cfg:
            print(f"# {config.run}\n{to_yaml(config)}", flush=True)
        cli_train.check(config)
        if line.check:
            from clipscale.tools import check_start  # imports torch

            check_start.main(config)
    if line.cfg or line.check:
        return 0
    os.environ.setdefault("WANDB_RUN_GROUP", folder.name)  # wandb shows the runs as one group
    results = []
    try:
        for number, config in enumerate(configs):
            run = Path(config.run).name
            say(f"run {number + 1} of {len(configs)}: {run}")
            of = {"name": run, "batch": config.batch, "objective": config.loss.objective}
            results.append(of | train(config))
    finally:
        if results:
            show(results, folder)
    failed = sum("error" in result for result in results)
    if failed:
        say(f"error: {failed} of {len(results)} runs failed", error=True)
        return 1
    return 0


def folder_name(combination: Sequence[str]) -> str:
    varying = ",".join(combination)
    name = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", re.sub(r"['\"]", "", varying)).strip("-") or "0"
    return name if len(name) <= 100 else f"{name[:90]}-{zlib.crc32(varying.encode()):08x}"


def train(config: TrainConfig) -> Record:
    """The result of one run, in processes of its own, or its error: a failure does not end the sweep, a signal does."""
    try:
        return cli_train.main(config, isolated=True)
    except StoppedError:
        raise
    except (UserError, local.WorkerError) as error:
        report(error, getattr(error, "details", ""))
        return {"error": str(error)}


def show(results: Sequence[Record], folder: Path) -> None:
    """Print a row for each run, with its error if it failed, and the results of all."""
    loss = loss_title({r["batch"] for r in results}, {r["objective"] for r in results})
    rows = []
    for r in results:
        less = math.log(r["batch"]) if loss != "loss" else 0
        shown = f"{r['loss'] - less:.4f}" if loss and "loss" in r else ""
        rows.append((r["name"], str(r.get("step", "")), shown, r.get("error", "done")))
    title = f"{folder}: {len(results)} runs"
    plain_console().print(TextTable(("run", "steps", loss, "outcome"), rows, title, left=("outcome",)))
    print_results({f"{r['name']}, {name}": metrics for r in results for name, metrics in r.get("eval", {}).items()})
