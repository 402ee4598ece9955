"""A run beside its plan: planned before it starts, and compared with what it has measured by `plan run=`."""

import json
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import torch

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import gpu_here, hardware_of
from clipscale.common.record import Record
from clipscale.common.units import format_bytes
from clipscale.config.parse import typed
from clipscale.config.stages import stages_of
from clipscale.config.train import TrainConfig
from clipscale.data.loader.memory import free_memory
from clipscale.launch.local import workers
from clipscale.log.records import read_metrics
from clipscale.models.sources import fetched_description
from clipscale.tools.plan.planner import plan
from clipscale.tools.plan.settings import PlanConfig

FILE = "plan.json"
"""In a run's folder: its plan beside what it has measured."""
FIRST = 2
"""The step from which on a run is compared: the first creates the optimizer's state and DDP's buckets."""
GONE = (
    "data.allow_pipe",
    "data.augment.greyscale",
    "data.augment.jitter",
    "data.decode",
    "data.max_pixels",
    "distill",
    "expected",
    "eval.loss_batch",
    "optim.on_divergence",
    "optim.warm_statistics",
)
"""Settings of earlier versions, which their runs' files have."""


def before(config: TrainConfig) -> str:
    """The plan of a run that starts on this machine, as JSON: whether it `fits`, and the `lines` to print; without
    lines where the GPU is unknown. Raises UserError, and whatever a dry run does with a model that has none.
    """
    gpu = gpu_here() if config.device != "cpu" else None
    unknown = config.device != "cpu" and not gpu and torch.cuda.is_available()  # as in a container without nvidia-smi
    hardware = hardware_of(gpu) if gpu else "cpu"
    if unknown or hardware is None:
        return json.dumps({"fits": True, "lines": []})
    machine = PlanConfig(hardware=hardware, gpus=workers(config), host_memory=free_memory())
    config = replace(config, model=fetched_description(config.model))
    result = largest_stage([of_training(stage, machine) for stage in stages_of(config)])
    lines = [result["conclusion"], f"the loss takes {format_bytes(result['loss_bytes'])}"]
    if time := result["time"]:
        lines.append(f"a step takes about {time['step_s']:.3g} s, by what is {time['what']}")
    return json.dumps({"fits": result["fits"], "lines": lines})


def largest_stage(configs: list[PlanConfig]) -> Record:
    """The plan of the stage that needs most."""
    plans = [plan(config, search=False) for config in configs]
    return max(plans, key=lambda result: (not result["fits"], result["peak_bytes"]))


def of_training(trained: TrainConfig, machine: PlanConfig) -> PlanConfig:
    """The settings of a run, on the machine of a plan."""
    values = {field.name: getattr(trained, field.name) for field in fields(TrainConfig)}
    return replace(machine, **values | {"run": ""})


def configs_of(folder: Path) -> list[PlanConfig]:
    """The settings of a run's stages, on the machine that it ran on. Raises UserError."""
    config = typed(TrainConfig, files.settings_of_run(folder), ignored=GONE)
    with files.reported("the run's", folder / "env.json", "restore it"):
        machine = files.read_json(folder / "env.json")
    hardware = hardware_of(machine["gpus"][0]) if machine["gpus"] and config.device != "cpu" else "cpu"
    if hardware is None:
        raise UserError(f"run={folder.name}: it ran on {machine['gpus'][0]}, which plan does not know")
    processes = machine["processes"]
    node = min(processes, len(machine["gpus"]) or processes)
    target = PlanConfig(hardware=hardware, gpus=node, nodes=processes // node)
    return [of_training(stage, target) for stage in stages_of(config)]


def compare(folder: Path) -> Record:
    """The plan of a run with `compared`: each figure beside the median of the run's records, and their ratio; None:
    not measured. `largest_error`: of the device's memory. Also written to RUN/plan.json, for `report` and later plans.

    Raises UserError for a run without a step.
    """
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise UserError(f"run={folder.name}: metrics.jsonl holds no step yet")
    records = [record for record in records if record["step"] >= FIRST] or records
    result = largest_stage(configs_of(folder))
    phases, process = result["device"]["phases"], result["host"]["process_bytes"]
    host = process["process"] + process["batch"] + process["evaluation"]
    if result["hardware"] == "cpu":  # resident right after the optimizer's step, whose memory malloc still holds
        host += phases["optim"]["peak_bytes"]
    figures = {name: (f"mem_{name}_bytes", phase["extra_bytes"]) for name, phase in phases.items()}
    figures["peak"] = ("mem_peak_bytes", result["peak_bytes"])
    figures["host"] = ("host_rss_bytes", host)
    figures["step"] = ("step_s", result["step_s"])
    compared: Record = {}
    for name, (key, predicted) in figures.items():
        values = [record[key] for record in records if record.get(key) is not None]
        measured = median(values) if values else None
        unit = key.rpartition("_")[2]
        ratio = predicted / measured if predicted and measured else None
        compared[name] = {f"predicted_{unit}": predicted, f"measured_{unit}": measured, "ratio": ratio}
    if measured := compared["step"]["measured_s"]:  # the share of what the arithmetic allows
        compared["step"]["share"] = result["least_step_s"] / measured
    errors = [abs(compared[name]["ratio"] - 1) for name in (*phases, "peak") if compared[name]["ratio"]]
    error = max(errors, default=None)
    result |= {"run": str(folder), "steps": len(records), "largest_error": error, "compared": compared}
    files.write_json(folder / FILE, result)
    return result
