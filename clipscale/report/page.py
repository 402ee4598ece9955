"""`clipscale report`: a run's curves as `report.png`, and `report.html` with results, retrieved examples, settings."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from PIL import Image, ImageDraw

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import printable, say
from clipscale.config.setting import flat
from clipscale.config.tools import ReportSettings, existing_run
from clipscale.report.evaluations import read_evaluations, read_galleries
from clipscale.report.metrics import read_metrics
from clipscale.report.table import TextTable, result_tables

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.1rem; } img { max-width: 100%; } figure { margin: 0.5rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; margin: 0.5rem 0; }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid #e5e7eb; text-align: right; }
th:first-child, td:first-child, table.plain td { text-align: left; }
"""
RIGHT = "#16a34a"
"""Colour of the frame around the right image."""
Record = dict[str, Any]


def main(settings: ReportSettings) -> Path:
    """Write the report and print its paths. Returns the page's path. Raises UserError."""
    html = write_report(existing_run(settings.run))
    say(html)
    say(html.with_suffix(".png"))
    return html


def write_report(run_dir: Path) -> Path:
    """Write `report.png` and `report.html` into the run folder and return the page's path.

    Raises UserError for a folder without steps in `metrics.jsonl`.
    """
    import matplotlib  # here: training starts a third of a second sooner

    from clipscale.report import plots

    records = read_metrics(run_dir / "metrics.jsonl")
    if not records:
        raise UserError(f"run={run_dir}: {run_dir / 'metrics.jsonl'} holds no step to report on")
    evaluations = [e for e in read_evaluations(run_dir) if e["step"] <= records[-1]["step"]]
    html = run_dir / "report.html"
    # Labels are data: a dollar sign is a dollar sign. Curves may have a million steps.
    with matplotlib.rc_context({"text.parse_math": False, "agg.path.chunksize": 10_000}):
        figure = plots.draw(records, evaluations)
        with files.reported("report", html, "make the run's folder writable"):
            figure.savefig(html.with_suffix(".png"), dpi=120)
            html.write_text(page(run_dir, records, evaluations), encoding="utf-8")
    return html


def page(run_dir: Path, records: Sequence[Record], evaluations: Sequence[Record]) -> str:
    """The page as text. Everything that comes from files is escaped."""
    name = escape(printable(run_dir.resolve().name))
    newest: dict[str, tuple[int, Mapping[str, float]]] = {}
    for evaluation in evaluations:
        newest |= {name: (evaluation["step"], metrics) for name, metrics in evaluation["results"].items()}
    results = {f"{name} (step {step})": metrics for name, (step, metrics) in newest.items()}
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{name}</title>",
        f"<style>{CSS}</style></head><body><h1>{name}</h1><p>{escape(summary(records))}</p>",
        *(table.html() for table in result_tables(results)),
        picture((run_dir / "report.png").read_bytes()),
        *(gallery(record, images) for record, images in read_galleries(run_dir)),
        details("Settings", yaml.safe_load((run_dir / "config.yaml").read_text())),
        details("Machine", json.loads((run_dir / "env.json").read_text())),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def summary(records: Sequence[Record]) -> str:
    """Steps, samples, last loss and median throughput, in one sentence."""
    last = records[-1]
    rates = [r["samples_per_s"] for r in records if "samples_per_s" in r]
    parts = [f"{last['step']:,} steps", f"{last.get('samples', 0):,} samples", f"last loss {last['loss']:.4f}"]
    return ", ".join(parts + ([f"{median(rates):,.0f} samples/s (median)"] if rates else []))


def gallery(record: Record, images: Image.Image) -> str:
    """A few captions, each above its nearest images. The right one has a frame; if it is none of them, it follows."""
    tile, columns = record["tile"], record["columns"]
    parts = [
        f"<h2>retrieved images: {escape(printable(record['set']))}, step {record['step']}; framed: the right one</h2>"
    ]
    for y, row in enumerate(record["rows"]):
        right = columns if row["hit"] is None else row["hit"]
        strip = images.crop((0, y * tile, tile * max(columns, right + 1), (y + 1) * tile))
        ImageDraw.Draw(strip).rectangle((right * tile, 0, (right + 1) * tile - 1, tile - 1), outline=RIGHT, width=4)
        drawn = io.BytesIO()
        strip.save(drawn, format="PNG")
        caption = escape(printable(row["caption"]))
        parts.append(f"<figure>{picture(drawn.getvalue())}<figcaption>{caption}</figcaption></figure>")
    return "\n".join(parts)


def picture(png: bytes) -> str:
    return f"<img alt='' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"


def details(title: str, tree: dict[str, Any]) -> str:
    """A table of dotted names and values, folded away."""
    rows = [(name, str(value)) for name, value in flat(tree)]
    return f"<details><summary>{title}</summary>{TextTable(('', ''), [rows]).html('plain')}</details>"
