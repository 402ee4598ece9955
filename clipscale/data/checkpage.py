"""How `data check` shows what it found: a table on the terminal, and one self-contained page with pictures."""

import html
from typing import Any

from rich.console import Console
from rich.table import Table

from clipscale.data.check import Findings, data_url
from clipscale.units import format_bytes

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse}td,th{padding:.15em .9em .15em 0;text-align:left;
vertical-align:top}td.n{text-align:right;font-variant-numeric:tabular-nums}.grid{display:grid;gap:14px;
grid-template-columns:repeat(auto-fill,minmax(140px,1fr))}figure{margin:0}img{max-width:100%;display:block;background:#eee}
figcaption{font-size:12px;line-height:1.35;overflow-wrap:anywhere}figcaption p{margin:0;max-height:6.75em;
overflow:auto}small{color:#777}code{font-size:12px;overflow-wrap:anywhere}"""


def rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What, how many, and a remark: the lines of the table."""
    samples = max(summary["samples"], 1)

    def share(count: int) -> str:
        return f"{100 * count / samples:.2f} %"

    found = [("samples", str(summary["samples"]), f"in {summary['shards']} shards, {format_bytes(summary['bytes'])}")]
    found.append(("usable", str(summary["usable"]), share(summary["usable"])))
    found += [(f"broken: {reason}", str(count), share(count)) for reason, count in summary["broken"].items()]
    found += [(f"dropped: {reason}", str(count), share(count)) for reason, count in summary["dropped"].items()]
    for shard, why in summary["damaged_shards"].items():
        found.append(("damaged shard", shard, why.replace(f"{shard}: ", "")))
    for shard, why in summary["index"]["mismatch"].items():
        found.append(("index mismatch", shard, why))
    if summary["index"]["missing"]:
        found.append(("shards without an index", str(summary["index"]["missing"]), "run `clipscale data index`"))
    names = {"key": "keys", "bytes": "pictures, byte for byte", "look": "pictures that look alike"}
    for kind, what in summary["duplicates"].items():
        found.append((f"duplicate {names[kind]}", str(what["surplus"]), f"{what['groups']} groups"))
    for name, label in (
        ("caption_characters", "caption, characters"),
        ("shorter_side", "shorter side, pixels"),
        ("aspect", "longer over shorter side"),
    ):
        if values := summary[name]:
            low, high = f"{values['min']} to {values['max']}", f"5 % {values['p05']}, 95 % {values['p95']}"
            found.append((label, str(values["median"]), f"median; {low}; {high}"))
    kinds = ", ".join(f"{name} {count}" for name, count in summary["formats"].items())
    return [*found, ("formats", "", kinds)] if kinds else found


def show(summary: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("", "", "", show_header=False, box=None, padding=(0, 2, 0, 0))
    for what, count, remark in rows(summary):
        table.add_row(what, count, remark)
    Console().print(table, markup=False)


def page(found: Findings, summary: dict[str, Any], title: str) -> str:
    """The page: numbers, a random sample of pictures with captions, and the names of broken samples."""

    def text(value: object) -> str:
        return html.escape(str(value).encode("utf-8", "replace").decode())

    lines = [
        f"<tr><td>{text(what)}</td><td class=n>{text(count)}</td><td>{text(remark)}</td></tr>"
        for what, count, remark in rows(summary)
    ]
    figures = [
        f'<figure><img src="{data_url(picture)}" alt="" loading="lazy"><figcaption><p>{text(picture.caption)}</p>'
        f"<small>{text(picture.name)}, {picture.width} x {picture.height}</small></figcaption></figure>"
        for picture in found.pictures
    ]
    named = [
        f"<h2>{text(reason)} ({(found.broken + found.dropped)[reason]})</h2><table>"
        + "".join(f"<tr><td><code>{text(name)}</code></td><td>{text(detail)}</td></tr>" for name, detail in examples)
        + "</table>"
        for reason, examples in sorted(found.examples.items())
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{text(title)}</title><style>{STYLE}</style><h1>{text(title)}</h1><table>{''.join(lines)}</table>"
        f"<h2>A random sample</h2><div class=grid>{''.join(figures)}</div>{''.join(named)}</html>\n"
    )
