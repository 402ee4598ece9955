"""The targets that benchmarks are held to, as lines: reached, missed, or not measured, with the figures."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clipscale.bench.present import lookup

Row = dict[str, Any]
Found = tuple[str, float | str]
"""What a figure is of, and the figure; or why there is none."""

WRONG = ("failed", "out of memory")
"""Statuses that miss a target. A row that lacks a figure for another reason is named and does not count."""


@dataclass(frozen=True)
class Target:
    """A bound on every figure that is found."""

    text: str
    holds: Callable[[float], bool]
    form: str = "{:.2f}"

    def judge(self, found: Iterable[Found]) -> str:
        """One line."""
        found = list(found)
        values = [value for _, value in found if not isinstance(value, str)]
        wrong = [value for _, value in found if value in WRONG]
        shown = ", ".join(f"{n} {v if isinstance(v, str) else self.form.format(v)}" for n, v in found)
        if not values and not wrong:
            return f"not measured: {self.text}: {shown or 'there are no such rows'}"
        return f"{'reached' if not wrong and all(map(self.holds, values)) else 'missed'}: {self.text}: {shown}"


def figures(rows: Iterable[Row], name: Callable[[Row], str], key: str) -> list[Found]:
    """The figure under a dotted key, or why a row has none."""

    def figure(row: Row) -> float | str:
        value = lookup(row, key)
        return str(row["status"]) if row["status"] != "ok" else "has no such figure" if value is None else float(value)

    return [(name(row), figure(row)) for row in rows]


def quotients(ours: Iterable[Row], rows: Sequence[Row], peer: str, name: Callable[[Row], str], key: str) -> list[Found]:
    """The peer's figure under a dotted key over ours, case by case."""
    found: list[Found] = []
    for row in ours:
        same = next((r for r in rows if r["method"] == peer and name(r) == name(row)), {"status": "not run"})
        if row["status"] != "ok":
            found.append((name(row), row["status"]))
        elif same["status"] != "ok":
            found.append((name(row), f"({peer}: {same['status']})"))
        else:
            own, theirs = lookup(row, key), lookup(same, key)
            found.append((name(row), theirs / own if own else math.inf))
    return found
