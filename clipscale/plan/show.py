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
        show_plan(result, config.utilisation, console)
    return 0 if result.get("fits", True) else 1


def show_plan(result: Result, utilisation: float, console: Console) -> None:
    """Print a plan as tables and lines; the last line is the conclusion."""
    settings, time, limits, host = (result[name] for name in ("settings", "time", "limits", "host"))
    chunks = " and ".join(map(str, dict.fromkeys(settings["chunk"].values())))
    heading = (
        f"{settings['model']}, batch {format_count(settings['batch'])}: {settings['local_batch']} samples on each of "
        f"{settings['nodes']} x {settings['gpus']} x {settings['hardware']}, in chunks of {chunks}, "
        f"{settings['precision']}, {settings['optim']}, offload={settings['offload']}, {settings['parallel']}"
    )
    console.print(printable(heading))
    for table in memory_tables(result["device"], host):
        console.print(table)
    if host["disk_bytes"]:
        console.print(f"and {format_bytes(host['disk_bytes'])} on the disk of each node\n")
    if time:
        names = ("encode", "loss", "ring", "replay", "gradients", "step")
        row = [*(f"{time[f'{name}_s']:.3g}" for name in names), f"{time['samples_per_s']:,.0f}"]
        title = f"seconds of a step, if the GPU reaches {utilisation:.0%} of its peak (assumed, not measured)"
        console.print(TextTable((*names, "samples/s"), [[row]], title))
        if time["hours"]:
            console.print(f"{time['hours']:,.1f} hours for the run's samples, at that rate\n")
    if limits:
        batch = format_count(limits["batch"]) if limits["batch"] else "none"
        console.print(f"largest batch that fits with these chunks, of this one's halves and doubles: {batch}")
    for note in result["notes"]:
        console.print(printable(note))
    console.print(result["conclusion"], style="bold")


def memory_tables(device: Result, host: Result) -> list[TextTable]:
    """The GPU's memory between steps and in a step, and the host's memory."""
    outside = {"cuBLAS workspace": device["workspace_bytes"], "outside of torch": device["outside_bytes"]}
    fixed = [[name, format_bytes(size)] for name, size in (device["fixed_bytes"] | outside).items() if size]
    keys = ("before_bytes", "extra_bytes", "peak_bytes")
    phases = [[name, *(format_bytes(phase[key]) for key in keys)] for name, phase in device["phases"].items()]
    host_bytes = host["process_bytes"] | {"all": sum(host["process_bytes"].values())}
    parts = [[name, format_bytes(size), format_bytes(size * host["processes"])] for name, size in host_bytes.items()]
    return [
        TextTable(("what", "bytes"), [fixed], "memory of one GPU, throughout"),
        TextTable(("phase", "before", "beyond", "peak"), [phases], "in a step, of torch's allocator"),
        TextTable(("what", "a process", "a node"), [parts], "memory of the host"),
    ]


def show_comparison(result: Result, console: Console) -> None:
    """Print predicted and measured memory side by side."""
    rows = []
    for name, entry in result["compared"].items():
        predicted, measured, ratio = entry.values()
        rows.append([name, format_bytes(predicted), *([format_bytes(measured), f"{ratio:.3f}"] if measured else "--")])
    title = f"{result['run']}: {result['settings']['hardware']}, medians of {result['steps']} steps"
    console.print(TextTable(("what", "predicted", "measured", "predicted / measured"), [rows], title))
    for note in result["notes"]:
        console.print(printable(note))
