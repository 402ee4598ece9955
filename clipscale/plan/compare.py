"""A prediction beside what a run has measured: RUN/config.yaml, env.json and metrics.jsonl."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from clipscale.autotune import remembered
from clipscale.config.parse import typed
from clipscale.config.tools import PlanConfig
from clipscale.config.train import TrainConfig
from clipscale.errors import UserError
from clipscale.hardware import hardware, hardware_of
from clipscale.plan.memory import PHASES
from clipscale.plan.planner import Plan, rehearsing
from clipscale.plan.rehearsal import TOWERS, rehearsed
from clipscale.units import run_folder

FIRST = 2
"""The first step makes the optimizer's state and DDP's buckets anew; steps count from here on, if there are any."""


def compare(config: PlanConfig, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """What `run=NAME json=true` prints (docs/plan.md); `say` as `plan` has it. Raises UserError where the folder is not that of a run."""
    folder = run_folder(config.run)
    planned, records = settings_of(config, folder), metrics_of(folder)
    gpu = None if planned.hardware == "cpu" else hardware(planned.hardware)
    found = {name: size for name in TOWERS if (size := remembered(folder, name))}
    ranks = planned.gpus * planned.nodes
    with rehearsed(planned, ranks, gpu.capability if gpu else None) as rehearsal:
        say(rehearsing(planned))
        made = Plan(planned, gpu, rehearsal, found)
        record, node = made.device_record(), made.host(made.local)
    rss = node.process["process"] + node.process["batch"]
    if gpu is None:  # it is asked for right after the optimizer's step, whose memory malloc still holds
        rss += made.memory.phase("optim")
    predicted = {name: record["phases"][name]["extra_bytes"] for name in PHASES}
    predicted |= {"peak": record["peak_bytes"], "host": rss}
    names = {name: f"mem_{name}_bytes" for name in (*PHASES, "peak")} | {"host": "host_rss_bytes"}
    compared = {}
    for name, key in names.items():
        values = [record[key] for record in records if record.get(key) is not None]
        measured = round(median(values)) if values else None
        compared[name] = {
            "predicted_bytes": predicted[name],
            "measured_bytes": measured,
            "ratio": predicted[name] / measured if measured else None,
        }
    ratios = [entry["ratio"] for name, entry in compared.items() if name != "host" and entry["ratio"]]
    notes = made.notes()
    if not ratios:
        notes.append("the run was on a CPU, which has no allocator to ask: only the host's memory was measured")
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
    for name in ("config.yaml", "env.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"run={config.run}: there is no {folder / name}; give the folder of a run that has begun")
    values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    trained = typed(TrainConfig, values)
    surroundings = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    processes, gpus = surroundings["processes"], surroundings["gpus"]
    on_gpu = bool(gpus) and trained.device != "cpu"
    found = hardware_of(gpus[0]) if on_gpu else "cpu"
    if not (config.hardware or found):
        raise UserError(f"run={config.run}: {gpus[0]} is not in the table of GPUs; give the nearest with hardware=NAME")
    own = {field.name for field in fields(PlanConfig)} - {field.name for field in fields(TrainConfig)}
    values_of_plan = {name: getattr(config, name) for name in own}
    per_node = min(processes, len(gpus)) if on_gpu else processes
    values_of_plan |= {"hardware": config.hardware or found, "gpus": per_node, "nodes": processes // per_node}
    return PlanConfig(**{field.name: getattr(trained, field.name) for field in fields(TrainConfig)}, **values_of_plan)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The steps to compare with."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if "step_s" in (record := json.loads(line))]
    if not records:
        raise UserError(f"run={folder}: metrics.jsonl holds no step yet")
    return [record for record in records if record["step"] >= FIRST] or records
