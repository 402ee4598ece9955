"""`clipscale plan`: prints whether a run fits and how long a step may take, or compares a prediction with a run."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clipscale.common.terminal import printable
from clipscale.common.units import format_bytes, format_count
from clipscale.config.eval import existing_run
from clipscale.config.stages import stages_of
from clipscale.log.table import TextTable, plain_console
from clipscale.tools.plan.of_run import compare, configs_of
from clipscale.tools.plan.planner import plan
from clipscale.tools.plan.settings import PlanConfig, on_machine

Result = dict[str, Any]


def main(config: PlanConfig) -> int:
    """Plan, or with `run` compare, and print; returns the exit status: 1 if the run does not fit. Raises UserError."""
    if config.run and not config.fit:
        result = compare(existing_run(config.run))
        show([result], [comparison(result)], as_json=config.json)
        return 0
    config = on_machine(config)
    stages = stages_of(config)
    if config.run:
        stages = [replace(stage, fit=True) for stage in configs_of(existing_run(config.run))]
    results = [plan(stage) for stage in stages]
    show(results, [parts(result, stage) for result, stage in zip(results, stages)], as_json=config.json)
    return 0 if all(result["fits"] for result in results) else 1


def show(results: list[Result], texts: list[Iterator[TextTable | str]], *, as_json: bool) -> None:
    """Print results as one JSON object, or their tables and lines."""
    console = plain_console()
    if as_json:
        console.print(json.dumps({"stages": results} if results[1:] else results[0], indent=1), soft_wrap=True)
        return
    for text in texts:
        for part in text:
            console.print(part, soft_wrap=isinstance(part, str))


def parts(result: Result, config: PlanConfig) -> Iterator[TextTable | str]:
    """A plan as tables and lines; the last line is the conclusion."""
    chunk, kept, host, again = result["chunk"], result["kept"], result["host"], result["second_pass"]
    graphs = f"{kept['image']} and {kept['text']}"
    twice = f"{again['image']:.0%} of the images and {again['text']:.0%} of the texts"
    yield (
        f"{printable(config.model.name)}, batch {format_count(result['batch'])}: {result['local_batch']} samples on "
        f"each of {config.nodes} x {config.gpus} x {config.hardware}, in chunks of {chunk['image']} images and "
        f"{chunk['text']} texts (graphs kept: {graphs}; encoded twice: {twice}), {config.precision}, "
        f"{config.optim.name}, offload={result['offload']}, exchange={result['exchange']}, {config.launch.parallel}"
    )
    phases = []
    for name, sizes in result["device"]["phases"].items():
        phases.append([name, *(format_bytes(sizes[f"{what}_bytes"]) for what in ("before", "extra", "peak"))])
    title = "memory of one GPU in a step, of torch's allocator"
    yield TextTable(["phase", "before", "extra", "peak"], phases, title)
    holders = [[what, format_bytes(size)] for what, size in host["process_bytes"].items() if size]
    holders.append([f"all {host['processes']} processes of a node", format_bytes(host["node_bytes"])])
    yield TextTable(["what", "bytes"], holders, "memory of the host, by process")
    if time := result["time"]:
        spent = ", ".join(f"{name.removesuffix('_s')} {time[name]:.3g}" for name in list(time)[2:-2])
        yield (
            f"a step takes about {time['step_s']:.3g} s ({spent}), {time['samples_per_s']:,.0f} samples/s, at "
            f"{time['share']:.1%} of the peak: {printable(time['what'])}"
        )
    yield from result["notes"]
    yield result["conclusion"]


def comparison(result: Result) -> Iterator[TextTable | str]:
    """Predicted and measured figures side by side."""
    rows = []
    for name, entry in result["compared"].items():
        cells = [name]
        for key, value in list(entry.items())[:3]:
            if value is None:
                cells.append("--")
            else:
                cells.append(format_bytes(value) if key.endswith("_bytes") else f"{value:.3g}")
        rows.append(cells)
    title = f"{result['run']}: {result['hardware']}, medians of {result['steps']} steps"
    yield TextTable(["what", "predicted", "measured", "ratio"], rows, title)
    yield from result["notes"]
