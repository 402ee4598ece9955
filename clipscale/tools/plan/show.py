"""`clipscale plan`: prints whether a run fits and how long a step may take, or compares a prediction with a run."""

import json
from collections.abc import Iterator
from dataclasses import replace

from clipscale.common.record import Record
from clipscale.common.terminal import printable
from clipscale.common.units import format_bytes, format_count, format_decimal
from clipscale.config.batches import published_batch
from clipscale.config.eval import existing_run
from clipscale.config.stages import stages_of
from clipscale.log.table import TextTable, plain_console
from clipscale.tools.plan.of_run import compare, configs_of
from clipscale.tools.plan.planner import plan
from clipscale.tools.plan.settings import PlanConfig, on_machine


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


def show(results: list[Record], texts: list[Iterator[TextTable | str]], *, as_json: bool) -> None:
    """Print results as one JSON object, or their tables and lines."""
    console = plain_console()
    if as_json:
        console.print(json.dumps({"stages": results} if results[1:] else results[0], indent=1), soft_wrap=True)
        return
    for text in texts:
        for part in text:
            console.print(part, soft_wrap=isinstance(part, str))


def parts(result: Record, config: PlanConfig) -> Iterator[TextTable | str]:
    """A plan as lines and tables: what most people ask first, then what it rests on."""
    yield result["conclusion"]
    yield from answers(result, config)
    chunk, kept, host, again = result["chunk"], result["kept"], result["host"], result["second_pass"]
    batch = format_count(result["batch"])
    local = format_count(result["local_batch"])
    yield (
        f"{printable(config.model.name)}, batch {batch}: {local} samples on each of {config.nodes} x {config.gpus} x "
        f"{config.hardware}, {config.precision}, {config.optim.name}, offload={result['offload']}, "
        f"exchange={result['exchange']}, {config.launch.parallel}"
    )
    yield (
        f"chunks of {chunk['image']} images and {chunk['text']} texts; graphs kept: {kept['image']} and "
        f"{kept['text']}; encoded twice: {again['image']:.0%} of the images and {again['text']:.0%} of the texts"
    )
    phases = [
        [name, gib(sizes["before_bytes"]), gib(sizes["extra_bytes"]), gib(sizes["peak_bytes"])]
        for name, sizes in result["device"]["phases"].items()
    ]
    title = "memory of one GPU in a step, of torch's allocator"
    yield TextTable(["phase", "before, GiB", "extra", "peak"], phases, title)
    holders = [[what, gib(size)] for what, size in host["process_bytes"].items() if size]
    holders.append([f"all {host['processes']} processes of a node", gib(host["node_bytes"])])
    yield TextTable(["what", "GiB"], holders, "memory of the host, by process")
    yield from result["notes"]


def answers(result: Record, config: PlanConfig) -> Iterator[str]:
    """How fast it is, how long it takes, and which batch: a line each, of what is known."""
    if time := result["time"]:
        gpus = config.gpus * config.nodes
        rate = time["samples_per_s"]
        plain = time["plain_samples_per_s"] / gpus
        low, high = (end / gpus for end in time["range"])
        spread = f" ({rounded(low)} to {rounded(high)})" if high > low else ""
        yield (
            f"speed: about {rounded(rate / gpus)} images/s per GPU{spread}, {rounded(rate)} in all; a plain step, with "
            f"all graphs kept, {rounded(plain)} per GPU. By what is {printable(time['what'])}"
        )
        length = "give samples= for the length of the run"
        if config.epochs:
            length += f"; a plan reads no data, so epochs={config.epochs:g} are of an unknown set"
        if time["run_s"]:
            length = f"{duration(time['run_s'])} for {format_decimal(config.samples or 0)} samples"
        yield f"time: {length}; a step takes about {duration(time['step_s'])}"
    if published := published_batch(config):
        yield published
    if batch := result.get("largest_batch"):
        node = format_bytes(result["largest_host_bytes"])
        yield f"largest batch with these chunks: {format_count(batch)}, with {node} of host memory on each node"


def rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def duration(seconds: float) -> str:
    """Three digits in the largest unit: `2.5 min`, `8.6 days`."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def comparison(result: Record) -> Iterator[TextTable | str]:
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
