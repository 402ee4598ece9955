"""Compares a prediction with the memory that a run has measured, from RUN/config.yaml, env.json and metrics.jsonl."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import hardware, hardware_of
from clipscale.config.checks import begun_run
from clipscale.config.parse import typed
from clipscale.config.secrets import restored
from clipscale.config.tools import PlanConfig
from clipscale.config.train import TrainConfig
from clipscale.plan.dry_run import PHASES, TOWERS, dry_run
from clipscale.plan.planner import MemoryPlan, announcement
from clipscale.report.metrics import read_metrics
from clipscale.step.chunk_sizes import saved_chunk_sizes

FIRST = 2
"""Steps count from here on: the first step creates the optimizer's state and DDP's buckets."""


def compare(config: PlanConfig, announce: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The object that `run=NAME json=true` prints (docs/plan.md); `announce` as in `plan`. Raises UserError for a folder without a run."""
    folder = begun_run(config.run)
    planned, records = settings_of(config, folder), steps_of(folder)
    gpu = None if planned.hardware == "cpu" else hardware(planned.hardware)
    found = saved_chunk_sizes(folder)
    with dry_run(planned, planned.gpus * planned.nodes, gpu.capability if gpu else None) as run:
        announce(announcement(planned))
        made = MemoryPlan(planned, gpu, run, found)
        record, process = made.device_record(), made.host(made.local).process
    resident = process["process"] + process["batch"]
    if gpu is None:  # the run asks for it right after the optimizer's step, whose memory malloc still holds
        resident += int(made.step.phase("optim"))
    predicted = {name: record["phases"][name]["extra_bytes"] for name in PHASES}
    predicted |= {"peak": record["peak_bytes"], "host": resident}
    compared = {}
    for name, size in predicted.items():
        key = "host_rss_bytes" if name == "host" else f"mem_{name}_bytes"
        values = [value for record in records if isinstance(value := record.get(key), int | float)]
        measured = round(median(values)) if values else None
        ratio = size / measured if measured else None
        compared[name] = {"predicted_bytes": size, "measured_bytes": measured, "ratio": ratio}
    ratios = [entry["ratio"] for name, entry in compared.items() if name != "host" and entry["ratio"]]
    notes = made.notes()
    if not ratios:
        notes.append("the run was on a CPU, where only the host's memory is measured")
    return {
        "run": str(folder),
        "hardware": planned.hardware,
        "gpus": planned.gpus,
        "nodes": planned.nodes,
        "chunk": {name: chunk or made.local for name, chunk in zip(TOWERS, made.chunks)},
        "steps": len(records),
        "compared": compared,
        "largest_error": max(abs(ratio - 1) for ratio in ratios) if ratios else None,
        "notes": notes,
    }


def settings_of(config: PlanConfig, folder: Path) -> PlanConfig:
    """The run's settings, on the machine it ran on unless `config` names another."""
    with files.reported(f"run={config.run}", folder / "config.yaml", "restore the file"):
        trained = typed(TrainConfig, restored(files.read_tree(folder / "config.yaml")))
    processes, gpus = _machine_of(config, folder / "env.json")
    on_gpu = bool(gpus) and trained.device != "cpu"
    device = config.hardware or (hardware_of(gpus[0]) if on_gpu else "cpu")
    if not device:
        raise UserError(f"run={config.run}: {gpus[0]} is not in the table of GPUs; give the nearest with hardware=NAME")
    per_node = min(processes, len(gpus)) if on_gpu else processes
    values = {field.name: getattr(config, field.name) for field in fields(PlanConfig)}
    values |= {field.name: getattr(trained, field.name) for field in fields(TrainConfig)}
    return PlanConfig(**values | {"hardware": device, "gpus": per_node, "nodes": processes // per_node})


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The records to compare with. Raises UserError if there are none."""
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "step_s" in record]
    if not records:
        raise UserError(f"run={folder}: metrics.jsonl holds no step yet")
    return [record for record in records if record["step"] >= FIRST] or records


def _machine_of(config: PlanConfig, file: Path) -> tuple[int, list[str]]:
    """Processes and GPUs of the run, from its env.json. Raises UserError."""
    with files.reported(f"run={config.run}", file, "restore the file"):
        record = files.read_tree(file)
        processes, gpus = record.get("processes"), record.get("gpus")
        if type(processes) is not int or not 0 < processes < 2**20:
            raise ValueError("processes: no number of processes")
        if not isinstance(gpus, list) or not all(isinstance(gpu, str) for gpu in gpus):
            raise ValueError("gpus: no list of names")
        return processes, gpus
