"""A run beside its plan: planned before it starts, compared when it has ended, or by `plan run=`."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from clipscale import checkpoint
from clipscale.common import files
from clipscale.common.errors import UserError, first_line
from clipscale.common.hardware import gpu_here, hardware_of
from clipscale.common.terminal import say
from clipscale.common.units import format_bytes
from clipscale.config.stages import stages_of
from clipscale.config.tools import PlanConfig
from clipscale.config.train import TrainConfig
from clipscale.data.loader.memory import free_memory
from clipscale.log.metrics import read_metrics
from clipscale.tools.plan.planner import plan, shares

FILE, FIRST, WRONG = "plan.json", 2, 0.1
"""In a run's folder; the step from which on it is compared, since the first creates the optimizer's state and DDP's
buckets; and the relative error from which on a prediction is called wrong."""
Result = dict[str, Any]


def before(config: TrainConfig, processes: int) -> None:
    """Plan a run of so many processes a node on this machine (of its stages the one that needs most), print it and
    write RUN/plan.json. Raises UserError for a run that cannot fit. What has no dry run starts without a plan.
    """
    gpu = gpu_here() if config.device != "cpu" else None
    hidden = config.device != "cpu" and not gpu and torch.cuda.is_available()  # as without nvidia-smi in a container
    device = hardware_of(gpu) if gpu else None if hidden else "cpu"
    nodes = int(os.environ.get("WORLD_SIZE", processes)) // processes
    if not device or any(part.batch % (processes * nodes) for part in stages_of(config)):  # the run refuses that
        return
    machine = PlanConfig(hardware=device, gpus=processes, nodes=nodes, host_memory=free_memory())
    try:
        plans = [plan(of_training(part, machine), search=False) for part in stages_of(config)]
    except UserError:
        raise
    except Exception as error:
        say(f"plan: the dry run of this run failed ({first_line(error)})", error=True)
        return
    result = max(plans, key=lambda each: max(shares(each).values()))
    if not result["fits"]:
        raise UserError(f"this run {result['conclusion']}; plan=false starts it all the same")
    checkpoint.make_folder(Path(config.run))
    files.write_json(Path(config.run) / FILE, result)
    phase, sizes = max(result["device"]["phases"].items(), key=lambda item: item[1]["peak_bytes"])
    peak, loss = format_bytes(sizes["peak_bytes"]), format_bytes(result["loss_bytes"])
    time = "nothing is known yet of the time on such a machine"
    if result["time"]:
        least, most = result["step_range_s"]
        time = f"a step takes about {result['step_s']:.3g} s, by {result['time']['what']}"
        time += f" ({least:.3g} to {most:.3g} s)" if gpu else ""
    for line in (result["conclusion"], f"memory peaks in {phase}, at {peak}; the loss takes {loss}", time):
        say(f"plan: {line}")


def of_training(trained: TrainConfig, machine: PlanConfig) -> PlanConfig:
    """The settings of a run, on the machine of a plan."""
    values = {field.name: getattr(trained, field.name) for field in fields(TrainConfig)}
    return replace(machine, **values | {"run": ""})


def after(config: TrainConfig) -> None:
    """Compare the run that has ended with its plan, in RUN/plan.json, and say where that was wrong."""
    if (Path(config.run) / FILE).is_file() and read_metrics(Path(config.run) / "metrics.jsonl"):
        result = compare(Path(config.run))
        files.write_json(Path(config.run) / FILE, result)
        ratios = {name: entry["ratio"] for name, entry in result["compared"].items() if entry["ratio"]}
        wrong = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if abs(ratio - 1) > WRONG]
        errors = f"off by more than {WRONG:.0%}: {', '.join(wrong)}" if wrong else f"right in {', '.join(ratios)}"
        say(f"plan: predicted over measured, {errors}")


def compare(folder: Path) -> Result:
    """RUN/plan.json with `compared`: each figure beside the median of the run's records, and their ratio; None: not
    measured. `largest_error`: of the device's memory. Raises UserError for a run without a plan, or without a step.
    """
    if not (folder / FILE).is_file():
        raise UserError(f"run={folder.name}: it has not been planned; plan.json is written by a run with plan=true")
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise UserError(f"run={folder.name}: metrics.jsonl holds no step yet")
    records = [record for record in records if record["step"] >= FIRST] or records
    result: Result = json.loads((folder / FILE).read_text(encoding="utf-8"))
    phases, process = result["device"]["phases"], result["host"]["process_bytes"]
    # On a CPU the run asks for the resident memory right after the optimizer's step, whose memory malloc still holds.
    resident = phases["optim"]["peak_bytes"] if result["hardware"] == "cpu" else 0
    host = process["process"] + process["batch"] + process["evaluation"] + resident
    figures = {name: (f"mem_{name}_bytes", phase["extra_bytes"]) for name, phase in phases.items()}
    figures |= {"peak": ("mem_peak_bytes", result["peak_bytes"]), "host": ("host_rss_bytes", host)}
    compared: Result = {}
    for name, (key, value) in (figures | {"step": ("step_s", result["step_s"])}).items():
        values = [record[key] for record in records if record.get(key) is not None]
        measured, unit = (median(values) if values else None), key.rpartition("_")[2]
        ratio = value / measured if value and measured else None
        compared[name] = {f"predicted_{unit}": value, f"measured_{unit}": measured, "ratio": ratio}
    if measured := compared["step"]["measured_s"]:  # the share of what the arithmetic allows
        compared["step"]["share"] = result["step_range_s"][0] / measured
    errors = [abs(compared[name]["ratio"] - 1) for name in (*phases, "peak") if compared[name]["ratio"]]
    steps = {"run": str(folder), "steps": len(records), "largest_error": max(errors, default=None)}
    return result | steps | {"compared": compared}
