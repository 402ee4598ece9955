"""`report.html`: one self-contained page with the picture, the results, the settings and the machine."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from clipscale.report.table import result_rows

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { width: 100%; border: 1px solid #e5e7eb; border-radius: 6px; }
table { border-collapse: collapse; margin: 0.5rem 0; } th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid #e5e7eb; }
th { font-weight: 600; text-align: right; } td { text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, table.plain td { text-align: left; }
table.plain td { font-family: ui-monospace, monospace; font-size: 13px; } summary { cursor: pointer; font-weight: 600; }
"""


def page(
    run_dir: Path, records: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], picture: bytes
) -> str:
    """The page as text; everything that comes from files is escaped."""
    name = escape(run_dir.resolve().name)
    image = base64.b64encode(picture).decode()
    newest: dict[str, tuple[int, Mapping[str, float]]] = {}
    for evaluation in evaluations:
        newest |= {name: (evaluation["step"], metrics) for name, metrics in evaluation["results"].items()}
    results = {f"{name} (step {step})": metrics for name, (step, metrics) in newest.items()}
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{name}</title><style>{CSS}</style></head><body>",
        f"<h1>{name}</h1><p>{escape(summary(records))}</p>",
        *(_table(head, rows) for head, rows in result_rows(results)),
        f"<p><img alt='curves and retrieved images' src='data:image/png;base64,{image}'></p>",
        _details("Settings", _flat(_load(run_dir / "config.yaml"))),
        _details("Machine", _flat(_load(run_dir / "env.json"))),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Length, last loss and typical speed of the run in a sentence."""
    last = records[-1]
    text = f"{last['step']:,} steps"
    if "samples" in last:
        text += f", {last['samples']:,} samples"
    if isinstance(last.get("loss"), float):
        text += f", last loss {last['loss']:.4f}"
    rates = [r["samples_per_s"] for r in records if isinstance(r.get("samples_per_s"), int | float)]
    if rates:
        text += f", {median(rates):,.0f} samples/s (median)"
    return text


def _load(file: Path) -> Any:
    if not file.is_file():
        return {}
    return json.loads(file.read_text()) if file.suffix == ".json" else yaml.safe_load(file.read_text())


def _flat(value: Any, prefix: str = "") -> list[list[str]]:
    """Nested settings as dotted names and values."""
    if isinstance(value, dict) and value:
        return [row for key, inner in value.items() for row in _flat(inner, f"{prefix}.{key}" if prefix else str(key))]
    return [[prefix, str(value)]] if prefix else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table class='{css}'>{line('th', head) if head else ''}\n{body}</table>"


def _details(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>{title}</summary>{_table((), rows, 'plain')}</details>" if rows else ""
