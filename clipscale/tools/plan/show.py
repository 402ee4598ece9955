"""`clipscale plan`: prints whether a run fits and how long a step may take, or compares a prediction with a run."""

import json
import re
from collections.abc import Iterable
from typing import Any

from clipscale.common.terminal import printable
from clipscale.common.units import format_bytes, format_count
from clipscale.config.stages import stages_of
from clipscale.config.tools import PlanConfig, existing_run
from clipscale.log.table import TextTable, plain_console
from clipscale.tools.plan.of_run import compare
from clipscale.tools.plan.planner import plan

Result = dict[str, Any]


def main(config: PlanConfig) -> int:
    """Plan, or with `run` compare, and print; returns the exit status: 1 if the run does not fit. Raises UserError."""
    console, stages = plain_console(), [] if config.run else stages_of(config)
    results = [plan(stage) for stage in stages] or [compare(existing_run(config.run))]
    if config.json:
        console.print(json.dumps({"stages": results} if results[1:] else results[0], indent=1), soft_wrap=True)
    for stage, result in zip(stages or [config], [] if config.json else results):
        for part in comparison(result) if config.run else parts(result, stage):
            console.print(part, soft_wrap=isinstance(part, str))
    return 0 if config.run or all(result["fits"] for result in results) else 1


def table(title: str, rows: list[Result]) -> TextTable:
    """A table of records of equal keys, whose ends say what their values are."""
    heads = [re.sub(r"(?<!per)_(bytes|s)$", "", key).replace("_", " ").replace(" per ", "/") for key in rows[0]]
    return TextTable(heads, [[[cell(key, value) for key, value in row.items()] for row in rows]], title)


def cell(key: str, value: Any) -> str:
    """A value as text: bytes, shares, seconds, counts."""
    if value is None or isinstance(value, str):
        return printable(value or "--")
    if key.endswith(("bytes", "share")):
        return format_bytes(value) if key.endswith("bytes") else f"{value:.1%}"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"


def parts(result: Result, config: PlanConfig) -> Iterable[TextTable | str]:
    """A plan as tables and lines; the last line is the conclusion."""
    device, host, chunk, kept = result["device"], result["host"], result["chunk"], result["kept"]
    yield (
        f"{printable(config.model.name)}, batch {format_count(result['batch'])}: {result['local_batch']} samples on "
        f"each of {config.nodes} x {config.gpus} x {config.hardware}, in chunks of {chunk['image']} images and "
        f"{chunk['text']} texts (graphs kept: {kept['image']} and {kept['text']}), {config.precision.name}, "
        f"{config.optim.name}, offload={result['offload']}, {config.launch.parallel}"
    )
    phases = [{"phase": name} | phase for name, phase in device["phases"].items()]
    yield table("memory of one GPU in a step, of torch's allocator", phases)
    holders = host["process_bytes"] | {f"all {host['processes']} processes of a node": host["node_bytes"]}
    yield table("memory of the host, by process", [{"what": k, "bytes": v} for k, v in holders.items() if v])
    if estimates := list(enumerate(result["estimates"], 1)):
        hidden = ("what", "network_share", "sent_bytes", "share" if config.hardware == "cpu" else "")
        rows = [{"by": f"({i})"} | {k: v for k, v in each.items() if k not in hidden} for i, each in estimates]
        yield table("seconds of a step, at a share of the GPU's peak", rows)
        yield from (f"({i}) {printable(each['what'])}" for i, each in estimates)
    yield from result["notes"]
    yield result["conclusion"]


def comparison(result: Result) -> Iterable[TextTable | str]:
    """Predicted and measured figures side by side."""
    title = f"{result['run']}: {result['hardware']}, medians of {result['steps']} steps"
    entries = [(name, list(entry.items())[:3]) for name, entry in result["compared"].items()]
    rows = [{"what": name} | {k.partition("_")[0]: cell(k, v) for k, v in entry} for name, entry in entries]
    yield table(title, rows)
    yield from result["notes"]
