"""`clipscale report`: writes a run's `report.png` and `report.html`, a page with results and settings."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import printable, say
from clipscale.config.setting import flat
from clipscale.config.tools import ReportSettings, check_run
from clipscale.report.evaluations import read_evaluations
from clipscale.report.metrics import read_metrics
from clipscale.report.table import TextTable, result_tables

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { width: 100%; border: 1px solid #e5e7eb; border-radius: 6px; }
table { border-collapse: collapse; margin: 0.5rem 0; }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid #e5e7eb; }
th { font-weight: 600; text-align: right; } td { text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, table.plain td { text-align: left; }
table.plain td { font-family: ui-monospace, monospace; font-size: 13px; } summary { cursor: pointer; font-weight: 600; }
"""
Record = dict[str, Any]


def main(settings: ReportSettings) -> Path:
    """Write the report and print its paths. Returns the page's path. Raises UserError."""
    html = write_report(check_run(settings))
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
    with matplotlib.rc_context(plots.STYLE):
        drawn = io.BytesIO()
        plots.draw(run_dir, records, evaluations).savefig(drawn, format="png", dpi=120, facecolor="white")
    html = run_dir / "report.html"
    with files.reported("report", html, "make the run's folder writable"):
        (run_dir / "report.png").write_bytes(drawn.getvalue())
        html.write_text(page(run_dir, records, evaluations, drawn.getvalue()), encoding="utf-8")
    return html


def page(run_dir: Path, records: Sequence[Record], evaluations: Sequence[Record], picture: bytes) -> str:
    """The page as text. Everything that comes from files is escaped."""
    name = escape(printable(run_dir.resolve().name))
    image = base64.b64encode(picture).decode()
    newest: dict[str, tuple[int, Mapping[str, float]]] = {}
    for evaluation in evaluations:
        newest |= {name: (evaluation["step"], metrics) for name, metrics in evaluation["results"].items()}
    results = {f"{name} (step {step})": metrics for name, (step, metrics) in newest.items()}
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{name}</title>",
        f"<style>{CSS}</style></head><body>",
        f"<h1>{name}</h1><p>{escape(summary(records))}</p>",
        *(table.html() for table in result_tables(results)),
        f"<p><img alt='curves and retrieved images' src='data:image/png;base64,{image}'></p>",
        _details("Settings", yaml.safe_load((run_dir / "config.yaml").read_text())),
        _details("Machine", json.loads((run_dir / "env.json").read_text())),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def summary(records: Sequence[Record]) -> str:
    """Steps, samples, last loss and median throughput, in one sentence."""
    last = records[-1]
    rates = [r["samples_per_s"] for r in records if "samples_per_s" in r]
    parts = [f"{last['step']:,} steps", f"{last.get('samples', 0):,} samples", f"last loss {last['loss']:.4f}"]
    return ", ".join(parts + ([f"{median(rates):,.0f} samples/s (median)"] if rates else []))


def _details(title: str, tree: dict[str, Any]) -> str:
    """A table of dotted names and values, folded away."""
    rows = [(name, str(value)) for name, value in flat(tree)]
    return f"<details><summary>{title}</summary>{TextTable(('', ''), [rows]).html('plain')}</details>"
