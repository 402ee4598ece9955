"""A plan, and its comparison with a run, as tables."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from clipscale.units import format_bytes, format_count

Result = dict[str, Any]

MADE_OF = {
    "encode": "a chunk without a graph, and the features",
    "loss": "features, their gradients, tiles",
    "replay": "a chunk with its graph, gradients",
    "optim": "what the optimizer takes while it steps",
}


def show_table(console: Console, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Numbers to the right, words to the left."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for place, head in enumerate(heads):
        words = place == 0 or not rows or not rows[0][place][:1].isdigit()
        table.add_column(head, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(title)
    console.print(table)


def show_plan(result: Result, console: Console) -> None:
    settings, device, node, time = (result[name] for name in ("settings", "device", "host", "time"))
    chunk = settings["chunk"]
    chunks = str(chunk["image"]) if chunk["image"] == chunk["text"] else f"{chunk['image']} and {chunk['text']}"
    where = f"{settings['nodes']} x {settings['gpus']} x {settings['hardware']}"
    console.print(
        f"{settings['model']}, batch {format_count(settings['batch'])}: {settings['local_batch']} samples on each of {where}, in chunks of "
        f"{chunks}, {settings['precision']}, {settings['optim']}, offload={settings['offload']}, {settings['parallel']}"
    )
    parts = [(name, format_bytes(size)) for name, size in device["fixed_bytes"].items()]
    parts += [
        (name, format_bytes(device[key]))
        for name, key in (("cuBLAS workspace", "workspace_bytes"), ("outside of torch", "outside_bytes"))
        if device[key]
    ]
    show_table(console, "memory of one GPU, throughout", ("what", "bytes"), parts)
    rows = [
        (name, *(format_bytes(phase[f"{key}_bytes"]) for key in ("before", "extra", "peak")), MADE_OF[name])
        for name, phase in device["phases"].items()
    ]
    show_table(console, "in a step, of torch's allocator", ("phase", "before", "beyond", "peak", "beyond: what"), rows)
    rows = [
        (name, format_bytes(size), format_bytes(size * node["processes"]))
        for name, size in node["process_bytes"].items()
    ]
    rows.append(("all", format_bytes(sum(node["process_bytes"].values())), format_bytes(node["node_bytes"])))
    show_table(console, "memory of the host", ("what", "a process", "a node"), rows)
    if node["disk_bytes"]:
        console.print(f"and {format_bytes(node['disk_bytes'])} on the disk of each node\n")
    if time:
        names = ("encode", "loss", "ring", "replay", "gradients", "step")
        cells = tuple(f"{time[f'{name}_s']:.3g}" for name in names) + (f"{time['samples_per_s']:,.0f}",)
        title = f"seconds of a step, if the GPU reaches {time['assumed_utilisation']:.0%} of its peak (assumed, not measured)"
        show_table(console, title, (*names, "samples/s"), [cells])
        if time["hours"]:
            console.print(f"{time['hours']:,.1f} hours for the run's samples, at that rate\n")
    limits = result["limits"]
    if limits:
        chunk = f"cache.chunk={limits['chunk']}" if limits["chunk"] else "none"
        batch = f"batch={format_count(limits['batch'])}" if limits["batch"] else "none"
        bound = f" (bounded by {limits['batch_bound']})" if limits["batch_bound"] else ""
        console.print(f"largest power of two that fits: at this batch {chunk}; with this chunk {batch}{bound}")
    for note in result["notes"]:
        console.print(note)
    console.print(result["verdict"], style="bold")


def show_comparison(result: Result, console: Console) -> None:
    rows = [
        (
            name,
            format_bytes(entry["predicted_bytes"]),
            "-" if entry["measured_bytes"] is None else format_bytes(entry["measured_bytes"]),
            "-" if entry["ratio"] is None else f"{entry['ratio']:.3f}",
        )
        for name, entry in result["compared"].items()
    ]
    title = f"{result['run']}: {result['hardware']}, medians of {result['steps']} steps"
    show_table(console, title, ("what", "predicted", "measured", "predicted / measured"), rows)
    for note in result["notes"]:
        console.print(note)
