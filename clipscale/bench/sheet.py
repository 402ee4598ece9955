"""A benchmark's table, on the console and as Markdown, and what is put beside its record: the table in a file, and the picture."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Sheet:
    """A table of text."""

    title: str
    heads: Sequence[str]
    left: Container[str]
    """Heads of the columns that are words; the others are figures, flush right."""
    groups: Sequence[Sequence[Sequence[str]]]
    """Rows, in groups that are set apart on the console. A row may end early."""

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for head in self.heads:
            table.add_column(head, justify="left" if head in self.left else "right", no_wrap=True)
        for group in self.groups:
            for row in group:
                table.add_row(*row)
            table.add_section()
        return table

    def markdown(self) -> str:
        rows = [[*row, *[""] * (len(self.heads) - len(row))] for group in self.groups for row in group]
        rules = ["---" if head in self.left else "--:" for head in self.heads]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.heads, rules, *rows))


def grouped(rows: Sequence[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """Rows that follow each other with the same values of these keys, together."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if groups and all(groups[-1][0][key] == row[key] for key in keys):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def publish(sheet: Sheet, lines: Sequence[str], path: Path, draw: Callable[[Path], object], console: Console) -> None:
    """Print the table and what it does not say for itself, and put both (.md) and the picture (.png) beside the record at `path`."""
    console.print(sheet)
    for line in lines:
        console.print(line)
    said = "\n".join(f"- {line}" for line in lines)
    path.with_suffix(".md").write_text(f"# {sheet.title}\n\n{sheet.markdown()}\n\n{said}\n", encoding="utf-8")
    draw(path.with_suffix(".png"))
    console.print("\n" + "\n".join(str(path.with_suffix(suffix)) for suffix in (path.suffix, ".md", ".png")))
