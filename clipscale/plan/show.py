"""`clipscale plan`: prints whether a run fits and how long a step may take, or compares a prediction with a run."""

import json
from typing import Any

from rich.console import Console

from clipscale.common.terminal import printable
from clipscale.common.units import format_bytes, format_count
from clipscale.config.tools import PlanConfig
from clipscale.plan.planner import compare, plan
from clipscale.report.table import TextTable, plain_console

Result = dict[str, Any]


def main(config: PlanConfig) -> int:
    """Plan, or with `run` compare, and print; returns the exit status: 1 if the run does not fit. Raises UserError."""
    console = plain_console()
    result = compare(config) if config.run else plan(config)
    if config.json:
        console.print(json.dumps(result, indent=1), soft_wrap=True)
    elif config.run:
        show_comparison(result, console)
    else:
        show_plan(result, config, console)
    return 0 if result.get("fits", True) else 1


def show_plan(result: Result, config: PlanConfig, console: Console) -> None:
    """Print a plan as tables and lines; the last line is the conclusion."""
    device, host, time = result["device"], result["host"], result["time"]
    console.print(
        f"{printable(config.model.name)}, batch {format_count(config.batch)}: {result['local_batch']} samples on each "
        f"of {config.nodes} x {config.gpus} x {config.hardware}, in chunks of {result['chunk']['image']} images and "
        f"{result['chunk']['text']} texts, {config.precision.name}, {config.optim.name}, offload={config.offload}, "
        f"{config.launch.parallel}"
    )
    phases = [(name, *map(format_bytes, phase.values())) for name, phase in device["phases"].items()]
    heads = ("phase", "before", "beyond", "peak")
    console.print(TextTable(heads, [phases], "memory of one GPU in a step, of torch's allocator"))
    parts = [(name, format_bytes(size)) for name, size in host["process_bytes"].items()]
    parts.append((f"all {host['processes']} processes of a node", format_bytes(host["node_bytes"])))
    console.print(TextTable(("what", "bytes"), [parts], "memory of the host, by process"))
    if host["disk_bytes"]:
        console.print(f"and {format_bytes(host['disk_bytes'])} on the disk of each node\n")
    if time:
        names = ("encode", "loss", "ring", "replay", "gradients", "step")
        row = [*(f"{time[f'{name}_s']:.3g}" for name in names), f"{time['samples_per_s']:,.0f}"]
        title = f"seconds of a step, if the GPU reaches {config.utilisation:.0%} of its peak (assumed, not measured)"
        console.print(TextTable((*names, "samples/s"), [[row]], title))
        if time["hours"]:
            console.print(f"{time['hours']:,.1f} hours for the run's samples, at that rate\n")
    for note in result["notes"]:
        console.print(printable(note))
    console.print(result["conclusion"], style="bold", soft_wrap=True)


def show_comparison(result: Result, console: Console) -> None:
    """Print predicted and measured memory side by side."""
    rows = []
    for name, entry in result["compared"].items():
        predicted, measured, ratio = entry.values()
        rows.append([name, format_bytes(predicted), *([format_bytes(measured), f"{ratio:.3f}"] if measured else "--")])
    title = f"{result['run']}: {result['hardware']}, medians of {result['steps']} steps"
    console.print(TextTable(("what", "predicted", "measured", "predicted / measured"), [rows], title))
    for note in result["notes"]:
        console.print(printable(note))
