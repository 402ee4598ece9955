"""The report's part on classification sets: figures of classes, pairs that are confused, and pictures that are missed."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from clipscale.common import files
from clipscale.common.terminal import printable
from clipscale.report.evaluations import left_out
from clipscale.report.table import TextTable

SETS, ROWS, WORST = 20, 1000, 20
"""Most sets on a page, rows of a table of classes, and rows that are shown at once."""
CSS = """
figure { display: inline-block; width: 118px; margin: 4px; vertical-align: top; font-size: 11px; line-height: 1.25; }
figcaption { overflow-wrap: anywhere; }
figure b { color: #15803d; } figure i { color: #b91c1c; }
"""
Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Picture(TypedDict):
    """A missed picture, its class, and the class that scored higher."""

    right: str
    predicted: str
    margin: float
    jpeg: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*=*$", max_length=1 << 20)]


class _Misses(TypedDict):
    """What `eval/classes/SET.json` holds."""

    set: str
    step: Count | None
    images: Count
    misses: Count
    classes: list[tuple[str, Count, Count, Count]]
    pairs: Annotated[list[tuple[str, str, Count]], Field(max_length=1000)]
    worst: Annotated[list[_Picture], Field(max_length=200)]
    largest: Annotated[list[_Picture], Field(max_length=200)]


_MISSES = TypeAdapter(_Misses)


def read_misses(run_dir: Path) -> list[dict[str, Any]]:
    """The contents of at most SETS files `eval/classes/SET.json`. A damaged one is left out with a warning."""
    found = []
    for file in sorted((run_dir / "eval" / "classes").glob("*.json"))[:SETS]:
        try:
            record = files.read_json(file)
            _MISSES.validate_python(record)
            found.append(record)
        except (OSError, ValueError) as error:
            left_out(file, error)
    return found


def sections(run_dir: Path) -> str:
    """HTML of all sets, folded away; everything that comes from files is escaped."""
    return "\n".join(map(_section, read_misses(run_dir)))


def _section(record: dict[str, Any]) -> str:
    step = f", step {record['step']}" if record["step"] is not None else ""
    missed = f"{record['misses']:,} of {record['images']:,} missed"
    rows = [
        [name, f"{images:,}", *(f"{100 * hits / max(images, 1):.1f}" for hits in (top1, top5))]
        for name, images, top1, top5 in record["classes"][:ROWS]
    ]
    heads = ("class", "images", "top-1 %", "top-5 %")
    pairs = [[right, predicted, f"{count:,}"] for right, predicted, count in record["pairs"]]
    pair_heads = ("class", "predicted", "images")
    parts = [
        f"<details><summary>Classes and misses: {_text(record['set'] + step)} ({missed})</summary>",
        f"<h3>Worst classes</h3>{TextTable(heads, [rows[:WORST]]).html()}",
        _figures(record["worst"]),
        f"<h3>Confused most often</h3>{TextTable(pair_heads, [pairs[:WORST]], left=pair_heads[1:2]).html()}",
        _folded(f"{len(pairs)} pairs", TextTable(pair_heads, [pairs], left=pair_heads[1:2]), len(pairs)),
        f"<h3>Largest margins</h3>{_figures(record['largest'])}",
        _folded(f"{len(rows)} classes, worst first", TextTable(heads, [rows]), len(rows)),
        "</details>",
    ]
    return "\n".join(part for part in parts if part)


def _folded(title: str, table: TextTable, rows: int) -> str:
    """A table that is longer than what is shown already."""
    return f"<details><summary>{title}</summary>{table.html()}</details>" if rows > WORST else ""


def _figures(pictures: Sequence[dict[str, Any]]) -> str:
    """Pictures with their class, the predicted one, and by how much that scored higher."""
    return "".join(
        f"<figure><img alt='' src='data:image/jpeg;base64,{one['jpeg']}'><figcaption><b>{_text(one['right'])}</b><br>"
        f"<i>{_text(one['predicted'])}</i> +{one['margin']:.3f}</figcaption></figure>"
        for one in pictures
    )


def _text(text: str) -> str:
    return escape(printable(text))
