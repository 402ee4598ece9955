"""Evaluation results as tables: one for classification sets, one for retrieval sets, since their metrics differ."""

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Results = Mapping[str, Mapping[str, float]]

TITLES = {
    "images": "images",
    "captions": "texts",
    "broken": "broken",
    "top1": "top-1 %",
    "top5": "top-5 %",
    "mean_per_class_recall": "mean class recall %",
    "image_to_text_r1": "I→T R@1",
    "image_to_text_r5": "R@5",
    "image_to_text_r10": "R@10",
    "text_to_image_r1": "T→I R@1",
    "text_to_image_r5": "R@5",
    "text_to_image_r10": "R@10",
}
"""Column heads in their order; a metric without one is shown under its own name, last."""
COUNTS = ("images", "captions", "broken")


def result_rows(results: Results) -> list[tuple[list[str], list[list[str]]]]:
    """Tables as text: the head and the rows of each group of sets that share their metrics. Shares are in per cent."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, metrics in results.items():
        order = sorted(metrics, key=lambda m: list(TITLES).index(m) if m in TITLES else len(TITLES))
        groups.setdefault(tuple(order), []).append(name)
    tables = []
    for columns, names in groups.items():
        # Broken images are the exception: a column of zeros says nothing.
        shown = [c for c in columns if c != "broken" or any(results[name][c] for name in names)]
        rows = [[name, *(_cell(column, results[name][column]) for column in shown)] for name in names]
        tables.append((["set", *(TITLES.get(column, column) for column in shown)], rows))
    return tables


def result_tables(results: Results, title: str = "") -> list[Table]:
    """The same for the console."""
    tables = []
    for number, (head, rows) in enumerate(result_rows(results)):
        table = Table(
            title=title if number == 0 else None,
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for position, column in enumerate(head):
            table.add_column(column, justify="left" if position == 0 else "right", no_wrap=position == 0)
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def plain_console() -> Console:
    """What tables are printed to: the terminal in its width, or a file, where nothing is cut to fit."""
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 160)
    return console


def print_results(results: Results, title: str = "", console: Console | None = None) -> None:
    console = console or plain_console()
    for table in result_tables(results, title):
        console.print(table)


def _cell(metric: str, value: float) -> str:
    return f"{value:,.0f}" if metric in COUNTS else f"{100 * value:.1f}"
