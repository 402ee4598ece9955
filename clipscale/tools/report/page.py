"""`clipscale report`: writes a page about runs. The page works offline."""

import os
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median

from plotly.offline import get_plotlyjs

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Results
from clipscale.common.terminal import print_line
from clipscale.common.units import format_bytes
from clipscale.log.table import FIGURES, result_tables, with_start
from clipscale.tools.report.charts import Chart, curves
from clipscale.tools.report.runs import Run, read_runs
from clipscale.tools.report.settings import ReportSettings


def main(words: list[str], settings: ReportSettings) -> None:
    """Write the page and print its path. Raises UserError."""
    names = [*settings.run, *words]
    if not names:
        raise UserError("run is not set; give run=NAME, or several: clipscale report NAME...")
    print_line(write_report(names, settings.out))


def write_report(names: Sequence[str | Path], out: str | None = None) -> Path:
    """Write the page into the run's folder, the folder that holds all runs, or the file `out`. Returns its path.

    Raises UserError for runs without a step, and for what cannot be read or written.
    """
    runs = read_runs(names)
    above = os.path.commonpath([run.folder.resolve().parent for run in runs]) if runs[1:] else runs[0].folder
    path = Path(out).expanduser() if out else Path(above, "report.html")
    html = report_page(runs)
    with files.damage_to_user_error("report", path, "give a place that can be written, out=FILE"):
        if path.parent != runs[0].folder and path.is_file() and b'<script id="data"' not in path.read_bytes():
            raise ValueError("somebody else's file, or an old page: remove it")
        files.write_text(path, html)
    return path


@files.damage_to_user_error("the runs' records", "metrics.jsonl, eval/", "restore them, or move them away")
def report_page(runs: Sequence[Run]) -> str:
    """The page, with plotly inside, so that it can be sent. Everything that comes from files is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    folder = Path(__file__).parent
    templates = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False}
    templates.filters["bytes"] = format_bytes
    keys = sorted({key for run in runs for key in run.settings if key != "run"})
    label_form = "{1}" if len(runs) == 1 else "{0}, {1}"
    newest: Results = {}
    start: Results = {}
    for run in runs:
        for evaluation in run.evaluations:
            for name, metrics in evaluation["results"].items():
                (newest if evaluation["step"] else start)[label_form.format(run.name, name)] = metrics
    texts = {suffix: Markup((folder / f"page.{suffix}").read_text(encoding="utf-8")) for suffix in ("css", "js")}
    scripts = {"plotly": Markup(get_plotlyjs()), "js": texts["js"]}
    digests = [b64encode(sha256(text.encode()).digest()).decode() for text in scripts.values()]
    return templates.get_template("page.html").render(
        runs=runs,
        hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
        data=curves(runs),
        typical=median_of,
        written={
            label_form.format(run.name, name): rows for run in runs for name, rows in written_captions(run).items()
        },
        compared=compared_columns,
        short_paths=short_paths,
        card_note=card_note,
        notes=[
            text for metric, text in FIGURES["notes"].items() if any(metric in metrics for metrics in newest.values())
        ],
        results=result_tables(with_start(newest, start) or start),
        settings={key: [run.settings.get(key, "") for run in runs] for key in keys},
        **texts | scripts,
    )


def median_of(run: Run, key: str) -> float | None:
    """The median of a field over the run's records; None if none has it."""
    values = [value for value in (record.get(key) for record in run.records) if isinstance(value, int | float)]
    return median(values) if values else None


def compared_columns(
    scores: dict[str, list[str]], others: dict[str, list[str]]
) -> tuple[dict[str, list[str]], dict[str, str], list[str]]:
    """A table of runs, by the titles of its columns, in three parts:

    - the columns that tell the runs apart;
    - the value of each column that is the same for all runs;
    - the titles of scores that few runs have: at most half as many runs as have the most frequent score.
    """
    filled = {title: sum(map(bool, cells)) for title, cells in scores.items()}
    few = [title for title, count in filled.items() if 2 * count <= max(filled.values())]
    columns = {title: cells for title, cells in {**scores, **others}.items() if title not in few and any(cells)}
    equal = {title: cells[0] for title, cells in columns.items() if len(set(cells)) == 1}
    return {title: cells for title, cells in columns.items() if title not in equal}, equal, few


def written_captions(run: Run) -> dict[str, list[dict[str, str]]]:
    """Evaluation set -> pictures, and the captions that the model wrote of them in the newest evaluation with any."""
    captions: dict[str, list[dict[str, str]]] = {}
    for evaluation in run.evaluations:
        for name, facts in evaluation.get("measured", {}).items():
            rows = facts.get("written")
            if isinstance(rows, list):
                captions[name] = [{key: str(row[key]) for key in ("picture", "caption", "written")} for row in rows]
    return captions


def short_paths(values: Sequence[str]) -> Sequence[str]:
    """Paths, or lists of them, without their folders, if they still differ then."""
    short = [re.sub(r"[^\[,'\"]*/(?=[^/,\]'\"])", "", value) for value in values]
    return short if len(set(short)) == len(set(values)) else values


def card_note(run: Run, chart: Chart) -> str:
    """The note on a score's card: how many captions are distinct, if some repeat."""
    name = chart["key"].rpartition("/")[0]
    rows = [row for row in run.rows if f"{name}/distinct" in row]
    return f"{rows[-1][f'{name}/captions']:,} captions, {rows[-1][f'{name}/distinct']:,} distinct" if rows else ""
