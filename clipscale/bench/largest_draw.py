"""The picture of the search for the largest batch: what was tried, and the memory of the largest step that ran beside its prediction."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from clipscale.bench.runs_draw import sizes
from clipscale.bench.runs_table import where
from clipscale.report.plots import STYLE
from clipscale.units import format_count

LOOKS = {"ok": ("o", "#16a34a"), "refused": ("x", "#be123c"), "out of memory": ("X", "#be123c")}
OTHER = "s", "#9ca3af"


def draw(record: dict[str, Any], path: Path) -> Figure:
    """Write the picture."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        tries, memory = figure.subplots(1, 2)
        for status in dict.fromkeys(row["status"] for row in record["rows"]):
            own = [row for row in record["rows"] if row["status"] == status]
            marker, colour = LOOKS.get(status, OTHER)
            places, seconds = [row["batch"] for row in own], [row["seconds"] for row in own]
            tries.plot(places, seconds, marker, color=colour, label=status)
        tries.axvline(record["predicted"]["batch"], color="#475569", linewidth=1, linestyle="--", label="foreseen")
        batches = sorted({row["batch"] for row in record["rows"]})
        tries.set_xticks(batches, [format_count(batch) for batch in batches], rotation=45)
        tries.set_ylim(bottom=0)
        tries.set_xlabel("batch, pairs")
        tries.set_title("whole steps tried, seconds")
        tries.legend(loc="lower right")
        if "fits" in record:
            sizes(memory, record["fits"])
            memory.set_title(f"memory at {format_count(record['fits']['steps'][-1]['batch'])} pairs, MiB")
            memory.legend()
        else:
            memory.set_axis_off()
        facts = record["machine"]
        figure.suptitle(f"{where(record)}, torch {facts['versions']['torch']}", x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=120, facecolor="white", format="png")
    return figure
