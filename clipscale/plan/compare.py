"""Compares a prediction with the memory that a run has measured, from the files in its folder."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from clipscale import checkpoint
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

FIRST = 2
"""Steps count from here on: the first step creates the optimizer's state and DDP's buckets."""


def compare(config: PlanConfig, announce: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The object that `run=NAME json=true` prints (docs/plan.md); `announce` as in `plan`. Raises UserError."""
    folder = begun_run(config.run)
    run_config = settings_of(config, folder)
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] >= FIRST]
    if not records:
        raise UserError(f"run={config.run}: metrics.jsonl holds no second step yet")
    saved = checkpoint.found(folder)
    chunks = checkpoint.read_values(saved[-1])["chunks"] if saved else {}
    gpu = None if run_config.hardware == "cpu" else hardware(run_config.hardware)
    with dry_run(run_config, run_config.gpus * run_config.nodes, gpu.capability if gpu else None) as run:
        announce(announcement(run_config))
        made = MemoryPlan(run_config, gpu, run, chunks)
        device, process = made.device_record(), made.host(made.local)["process_bytes"]
    resident = process["process"] + process["batch"]
    if gpu is None:  # the run asks for it right after the optimizer's step, whose memory malloc still holds
        resident += int(made.step.phase("optim"))
    predicted = {f"mem_{name}_bytes": device["phases"][name]["extra_bytes"] for name in PHASES}
    predicted |= {"mem_peak_bytes": device["peak_bytes"], "host_rss_bytes": resident}
    compared = {}
    for key, size in predicted.items():
        values = [record[key] for record in records if record.get(key) is not None]
        measured = round(median(values)) if values else None
        ratio = size / measured if measured else None
        compared[key.split("_")[1 if key.startswith("mem") else 0]] = {
            "predicted_bytes": size,
            "measured_bytes": measured,
            "ratio": ratio,
        }
    ratios = [entry["ratio"] for name, entry in compared.items() if name != "host" and entry["ratio"]]
    on_cpu = [] if ratios else ["the run was on a CPU, where only the host's memory is measured"]
    return {
        "run": str(folder),
        "hardware": run_config.hardware,
        "gpus": run_config.gpus,
        "nodes": run_config.nodes,
        "chunk": {name: chunk or made.local for name, chunk in zip(TOWERS, made.chunks)},
        "steps": len(records),
        "compared": compared,
        "largest_error": max(abs(ratio - 1) for ratio in ratios) if ratios else None,
        "notes": made.notes() + on_cpu,
    }


def settings_of(config: PlanConfig, folder: Path) -> PlanConfig:
    """The run's settings, on the machine it ran on unless `config` names another."""
    trained = typed(TrainConfig, restored(yaml.safe_load((folder / "config.yaml").read_text())))
    env = json.loads((folder / "env.json").read_text())
    processes, gpus = env["processes"], env["gpus"] if trained.device != "cpu" else []
    device = config.hardware or (hardware_of(gpus[0]) if gpus else "cpu")
    if not device:
        raise UserError(f"run={config.run}: {gpus[0]} is not in the table of GPUs; give the nearest with hardware=NAME")
    per_node = min(processes, len(gpus)) if gpus else processes
    values = {field.name: getattr(config, field.name) for field in fields(PlanConfig)}
    values |= {field.name: getattr(trained, field.name) for field in fields(TrainConfig)}
    return PlanConfig(**values | {"hardware": device, "gpus": per_node, "nodes": processes // per_node})
