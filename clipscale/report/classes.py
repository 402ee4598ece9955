"""The report's part on classification sets: figures of classes, confused pairs, and missed pictures."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from clipscale.common.terminal import printable
from clipscale.report.evaluations import Record, whole
from clipscale.report.table import TextTable

ROWS, WORST = 1000, 20
"""Most rows of a table of classes, and rows that are shown at once."""
CSS = """
figure { display: inline-block; width: 118px; margin: 4px; vertical-align: top; font-size: 11px; line-height: 1.25; }
figcaption { overflow-wrap: anywhere; }
figure b { color: #15803d; } figure i { color: #b91c1c; }
"""


def read_misses(run_dir: Path) -> list[Record]:
    """The contents of `eval/classes/SET.json`."""
    return whole(sorted((run_dir / "eval" / "classes").glob("*.json")), lambda file: dict(json.loads(file.read_text())))


def sections(run_dir: Path) -> str:
    """HTML of all sets, folded away; everything that comes from files is escaped."""
    return "\n".join(map(_section, read_misses(run_dir)))


def _section(record: Record) -> str:
    step = f", step {record['step']}" if record["step"] is not None else ""
    missed = f"{record['misses']:,} of {record['images']:,} missed"
    rows = [
        [name, f"{images:,}", *(f"{100 * hits / max(images, 1):.1f}" for hits in (top1, top5))]
        for name, images, top1, top5 in record["classes"][:ROWS]
    ]
    pairs = [[right, predicted, f"{count:,}"] for right, predicted, count in record["pairs"]]
    heads, pair_heads = ("class", "images", "top-1 %", "top-5 %"), ("class", "predicted", "images")
    parts = [
        f"<details><summary>Classes and misses: {_text(record['set'] + step)} ({missed})</summary>",
        f"<h3>Worst classes</h3>{TextTable(heads, [rows[:WORST]]).html()}",
        _figures(record["worst"]),
        f"<h3>Confused most often</h3>{TextTable(pair_heads, [pairs[:WORST]], left=pair_heads[1:2]).html()}",
        f"<h3>Largest margins</h3>{_figures(record['largest'])}",
    ]
    if len(rows) > WORST:
        all_classes = TextTable(heads, [rows]).html()
        parts.append(f"<details><summary>{len(rows)} classes, worst first</summary>{all_classes}</details>")
    return "\n".join([*parts, "</details>"])


def _figures(pictures: Sequence[dict[str, Any]]) -> str:
    """Pictures with their class, the predicted one, and by how much that scored higher."""
    return "".join(
        f"<figure><img alt='' src='data:image/jpeg;base64,{escape(miss['jpeg'])}'><figcaption>"
        f"<b>{_text(miss['right'])}</b><br><i>{_text(miss['predicted'])}</i> +{miss['margin']:.3f}"
        "</figcaption></figure>"
        for miss in pictures
    )


def _text(text: str) -> str:
    return escape(printable(text))
