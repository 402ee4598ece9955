"""`clipscale plan`: prints whether a run fits and how long a step may take, or compares a prediction with a run."""

import json
import re
from collections.abc import Iterable
from typing import Any

from clipscale.common.terminal import printable
from clipscale.common.units import format_bytes, format_count
from clipscale.config.stages import stages_of
from clipscale.config.tools import PlanConfig
from clipscale.plan.of_run import compare
from clipscale.plan.planner import plan
from clipscale.report.table import TextTable, plain_console

Result = dict[str, Any]


def main(config: PlanConfig) -> int:
    """Plan, or with `run` compare, and print; returns the exit status: 1 if the run does not fit. Raises UserError."""
    console, stages = plain_console(), [] if config.run else stages_of(config)
    results = [plan(stage) for stage in stages] or [compare(config)]
    if config.json:
        console.print(json.dumps({"stages": results} if results[1:] else results[0], indent=1), soft_wrap=True)
    for stage, result in zip(stages or [config], [] if config.json else results):
        for part in comparison(result) if config.run else parts(result, stage):
            console.print(part, soft_wrap=isinstance(part, str))
    if config.out:
        draw(results[0], config.out)
    return 0 if all(result.get("fits", True) for result in results) else 1


def table(title: str, rows: Iterable[Result]) -> TextTable:
    """A table of records of equal keys. A key's end says what its values are."""
    rows = list(rows)
    heads = [re.sub(r"(?<!per)_(bytes|s)$", "", key).replace("_", " ").replace(" per ", "/") for key in rows[0]]
    return TextTable(heads, [[[cell(key, value) for key, value in row.items()] for row in rows]], title, left=("what",))


def cell(key: str, value: Any) -> str:
    """A value as text: bytes, shares, seconds, counts."""
    if value is None or isinstance(value, str):
        return printable(value or "--")
    if key.endswith("bytes"):
        return format_bytes(value)
    if key.endswith("share"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def parts(result: Result, config: PlanConfig) -> Iterable[TextTable | str]:
    """A plan as tables and lines; the last line is the conclusion."""
    device, host = result["device"], result["host"]
    yield (
        f"{printable(config.model.name)}, batch {format_count(result['batch'])}: {result['local_batch']} samples on "
        f"each of {config.nodes} x {config.gpus} x {config.hardware}, in chunks of {result['chunk']['image']} images "
        f"and {result['chunk']['text']} texts, {config.precision.name}, {config.optim.name}, "
        f"offload={result['offload']}, {config.launch.parallel}"
    )
    yield table(
        "memory of one GPU in a step, of torch's allocator",
        ({"phase": name} | phase for name, phase in device["phases"].items()),
    )
    holders = host["process_bytes"] | {f"all {host['processes']} processes of a node": host["node_bytes"]}
    yield table("memory of the host, by process", ({"what": k, "bytes": v} for k, v in holders.items() if v))
    if host["disk_bytes"]:
        yield f"and {format_bytes(host['disk_bytes'])} on the disk of each node\n"
    if estimates := result["estimates"]:
        hidden = ("what", "network_share", "sent_bytes", "share" if config.hardware == "cpu" else "")
        shown = [key for key in estimates[0] if key not in hidden]
        rows = ({"what": f"({i})"} | {key: each[key] for key in shown} for i, each in enumerate(estimates, 1))
        yield table("seconds of a step, at a share of the GPU's peak", rows)
        yield from (f"({i}) {printable(each['what'])}" for i, each in enumerate(estimates, 1))
    if result["scaling"]:
        yield table(f"this batch on more GPUs, at {result['time']['share']:.1%} of the peak", result["scaling"])
    if result["compare"]:
        yield table("loss (and peak) in GiB; --: does not fit", by_method(result["compare"]))
    if "published" in result:
        loss, peak = (format_bytes(result[f"published_{name}_bytes"]) for name in ("loss", "peak"))
        verdict = "fits" if result["published_fits"] else "does not fit"
        yield f"{result['published']} as published: loss {loss}, peak {peak}, {verdict}"
    yield from map(printable, result["notes"])
    yield result["conclusion"]


def by_method(rows: list[Result]) -> list[Result]:
    """A record for each method, as published and with this program's code, of what it takes at each batch."""
    lines: dict[str, Result] = {}
    for row in rows:
        for prefix, title in (("published_", "as published"), ("", "clipscale")):
            loss, peak = (row[f"{prefix}{name}_bytes"] / 2**30 for name in ("loss", "peak"))
            line = lines.setdefault(name := f"{row['method']}, {title}", {"method": name})
            line[format_count(row["batch"])] = f"{loss:.2f} ({peak:.1f})" if row[f"{prefix}fits"] else None
    return list(lines.values())


def draw(result: Result, out: str) -> None:
    """The field's picture, memory at the peak against the batch, as FILE.png, .pdf (matplotlib) or .html (Plotly)."""
    limit, titles = result["device"]["usable_bytes"] / 2**30, ("batch", "GiB of a GPU at the peak")
    curves = []
    for name in dict.fromkeys(row["method"] for row in result["compare"]):
        rows = [row for row in result["compare"] if row["method"] == name]
        x = [row["batch"] for row in rows]
        for title, dash, prefix in (("as published", "dash", "published_"), ("clipscale", "solid", "")):
            curves.append((f"{name}, {title}", dash, x, [row[f"{prefix}peak_bytes"] / 2**30 for row in rows]))
    if out.endswith(".html"):
        import plotly.graph_objects as go

        lines = [go.Scatter(x=x, y=y, name=name, line={"dash": dash}) for name, dash, x, y in curves]
        log = [{"type": "log", "title": title} for title in titles]
        page = go.Figure(lines, {"xaxis": log[0], "yaxis": log[1], "hovermode": "x unified"})
        page.add_hline(y=limit, line_dash="dot", annotation_text=result["hardware"])
        page.write_html(out)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, dash, x, y in curves:
        axes.loglog(x, y, linestyle=dash.replace("dash", "dashed"), marker=".", label=name)
    axes.axhline(limit, color="grey", linestyle=":", label=f"usable of {result['hardware']}")
    axes.set(xlabel=titles[0], ylabel=titles[1])
    axes.legend(fontsize="small")
    figure.savefig(out, dpi=150)


def comparison(result: Result) -> Iterable[TextTable | str]:
    """Predicted and measured figures side by side."""
    title = f"{result['run']}: {result['hardware']}, medians of {result['steps']} steps"
    rows = []
    for name, entry in result["compared"].items():
        key, values = ("s" if name == "step" else "bytes"), list(entry.values())
        rows.append(
            {"what": name, "predicted": cell(key, values[0]), "measured": cell(key, values[1]), "ratio": values[2]}
        )
    yield table(title, rows)
    yield from map(printable, result["notes"])
