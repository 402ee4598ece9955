"""`clipscale plan`: prints whether a run fits and how long a step may take, or compares a prediction with a run."""

import json
from typing import Any

from rich.console import Console

from clipscale.common.terminal import printable
from clipscale.common.units import format_bytes, format_count
from clipscale.config.tools import PlanConfig
from clipscale.plan.of_run import compare
from clipscale.plan.planner import plan
from clipscale.report.table import TextTable, plain_console

Result = dict[str, Any]
PARTS = ("encode", "loss", "ring", "replay", "gradients", "step")


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
    if config.out:
        draw(result, config.out)
    return 0 if result.get("fits", True) else 1


def show_plan(result: Result, config: PlanConfig, console: Console) -> None:
    """Print a plan as tables and lines; the last line is the conclusion."""
    device, host = result["device"], result["host"]
    console.print(
        f"{printable(config.model.name)}, batch {format_count(result['batch'])}: {result['local_batch']} samples on "
        f"each of {config.nodes} x {config.gpus} x {config.hardware}, in chunks of {result['chunk']['image']} images "
        f"and {result['chunk']['text']} texts, {config.precision.name}, {config.optim.name}, "
        f"offload={result['offload']}, {config.launch.parallel}"
    )

    def table(title: str, heads: tuple[str, ...], rows: Any) -> None:
        console.print(TextTable(heads, [list(rows)], title))

    phases = [(name, *map(format_bytes, phase.values())) for name, phase in device["phases"].items()]
    table("memory of one GPU in a step, of torch's allocator", ("phase", "before", "beyond", "peak"), phases)
    parts = [(name, format_bytes(size)) for name, size in host["process_bytes"].items() if size]
    parts.append((f"all {host['processes']} processes of a node", format_bytes(host["node_bytes"])))
    table("memory of the host, by process", ("what", "bytes"), parts)
    if host["disk_bytes"]:
        console.print(f"and {format_bytes(host['disk_bytes'])} on the disk of each node\n")
    if result["estimates"]:
        rows = []
        for each in result["estimates"]:
            hours = f"{each['hours']:,.1f}" if each["hours"] else ""
            seconds = [f"{each[f'{name}_s']:.3g}" for name in PARTS]
            share = f"{each['share']:.1%}" if config.hardware != "cpu" else ""
            rows.append((each["what"].split(":")[0], share, *seconds, f"{each['samples_per_s']:,.0f}", hours))
        table("seconds of a step, at a share of the GPU's peak", ("", "share", *PARTS, "samples/s", "hours"), rows)
        for each in result["estimates"]:
            if ": " in each["what"]:
                console.print(printable(each["what"]))
    if result["scaling"]:
        rows = [
            (
                f"{row['gpus']:,}", f"{row['local_batch']:,}", f"{row['step_s']:.3g}", f"{row['samples_per_s']:,.0f}",
                f"{row['network_share']:.1%}", f"{row['epoch_hours']:,.2f}", format_bytes(row["epoch_sent_bytes"]),
                format_bytes(row["epoch_read_bytes"]),
            )
            for row in result["scaling"]
        ]  # fmt: skip
        heads = ("GPUs", "samples each", "step s", "samples/s", "network", "epoch h", "sent by each", "read")
        table(f"this batch on more GPUs, at {result['time']['share']:.1%} of the peak", heads, rows)
    if config.compare:
        table("GiB of the loss (and at the peak); --: does not fit", *comparison(result["compare"]))
    if "published" in result:
        sizes = [format_bytes(result[f"published_{name}_bytes"]) for name in ("loss", "peak")]
        verdict = "fits" if result["published_fits"] else "does not fit"
        console.print(f"as published, {result['published']}: loss {sizes[0]}, peak {sizes[1]}, {verdict}")
    for note in result["notes"]:
        console.print(printable(note))
    console.print(result["conclusion"], style="bold", soft_wrap=True)


def comparison(rows: list[Result]) -> tuple[tuple[str, ...], list[list[str]]]:
    """A table of methods by batch: each as published, and with this program's code."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        for prefix, title in (("published_", "as published"), ("", "clipscale")):
            sizes = f"{row[f'{prefix}loss_bytes'] / 2**30:.2f} ({row[f'{prefix}peak_bytes'] / 2**30:.1f})"
            line = lines.setdefault(f"{row['method']}, {title}", [])
            line.append(sizes if row[f"{prefix}fits"] else "--")
    batches = list(dict.fromkeys(format_count(row["batch"]) for row in rows))
    return ("method", *batches), [[name, *line] for name, line in lines.items()]


def draw(result: Result, out: str) -> None:
    """The field's picture, memory at the peak against the batch, as FILE.png, .pdf (matplotlib) or .html (Plotly)."""
    curves: dict[tuple[str, bool], tuple[list[int], list[float]]] = {}
    for row in result["compare"]:
        for ours, key in ((False, "published_peak_bytes"), (True, "peak_bytes")):
            x, y = curves.setdefault((f"{row['method']}, {'clipscale' if ours else 'as published'}", ours), ([], []))
            x.append(row["batch"])
            y.append(row[key] / 2**30)
    limit, labels = result["device"]["usable_bytes"] / 2**30, ("batch", "GiB of a GPU at the peak")
    if out.endswith(".html"):
        import plotly.graph_objects as go

        page = go.Figure(layout={"hovermode": "x unified"})
        for (name, ours), (x, y) in curves.items():
            page.add_scatter(x=x, y=y, name=name, mode="lines+markers", line={"dash": None if ours else "dash"})
        page.add_hline(y=limit, line_dash="dot", annotation_text=result["hardware"])
        page.update_xaxes(type="log", title=labels[0])
        page.update_yaxes(type="log", title=labels[1])
        page.write_html(out)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, ours), (x, y) in curves.items():
        axes.loglog(x, y, "-" if ours else "--", marker="." if ours else "x", label=name)
    axes.axhline(limit, color="grey", linestyle=":", label=f"usable of {result['hardware']}")
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.set_xscale("log", base=2)
    axes.legend(fontsize="small")
    figure.savefig(out, dpi=150)


def show_comparison(result: Result, console: Console) -> None:
    """Print predicted and measured memory side by side."""
    rows = []
    for name, entry in result["compared"].items():
        predicted, measured, ratio = list(entry.values())[:3]
        text = format_bytes if name != "step" else "{:.3g} s".format
        rows.append([name, text(predicted) if predicted else "--", *([text(measured)] if measured else ["--"])])
        rows[-1] += [f"{ratio:.3f}"] if ratio else []
    title = f"{result['run']}: {result['hardware']}, medians of {result['steps']} steps"
    console.print(TextTable(("what", "predicted", "measured", "predicted / measured"), [rows], title))
    for note in result["notes"]:
        console.print(printable(note))
