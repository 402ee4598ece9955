"""`clipscale report`: a page about runs that works offline, and their charts as a picture for papers."""

import base64
import io
import os
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import printable, say
from clipscale.config.tools import ReportSettings
from clipscale.report.charts import AXES, charts_of, means, medians, points, published, thinned
from clipscale.report.runs import Record, Run, read_galleries, read_runs
from clipscale.report.table import FIGURES, TextTable, result_tables

POINTS, CHECKPOINTS = 3000, 8
"""Of all curves in one chart, about; and those whose retrieved pictures a page of one run shows."""


def main(words: list[str], settings: ReportSettings) -> None:
    """Write the page or the picture and print its path, or serve the page. Raises UserError."""
    runs = [*settings.run, *words]
    if not runs:
        raise UserError("run is not set; give run=NAME, or several: clipscale report NAME...")
    if settings.live:
        serve(lambda: page(read_runs(runs), settings.expected, live=True), settings.port)
    else:
        say(write_report(runs, settings.out, settings.expected))


def write_report(names: Sequence[str | Path], out: str | None = None, expected: str = "") -> Path:
    """Write the page into the run's folder, or the one that holds all runs; or what `out` names. Returns its path.

    Raises UserError for runs without a step, and for what cannot be read or written.
    """
    runs = read_runs(names)
    above = os.path.commonpath([run.folder.resolve().parent for run in runs]) if runs[1:] else runs[0].folder
    path = Path(out).expanduser() if out else Path(above, "report.html")
    with files.reported("report", path, "give a place that can be written, out=FILE"):
        if path.suffix in (".png", ".pdf"):
            from clipscale.report.picture import draw  # here: training starts a third of a second sooner

            draw(runs, expected, path)
        else:
            files.write_text(path, page(runs, expected))
            files.write_text(path.with_name("plotly.min.js"), plotly())
    return path


def plotly() -> str:
    """Plotly's script."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def serve(render: Callable[[], str], port: int) -> None:
    """Serve the page, as it is at each question, to this machine's browsers until Ctrl-C."""
    answers = {"/": (render, "text/html"), "/plotly.min.js": (plotly, "text/javascript")}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]  # a foreign name may have been let point here
            if self.path not in answers or host not in ("127.0.0.1", "localhost"):
                self.send_error(404)
                return
            text, kind = answers[self.path]
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Answer) as server:
        say(f"http://127.0.0.1:{server.server_port} follows the run until Ctrl-C")
        server.serve_forever()


def page(runs: Sequence[Run], expected: str = "", *, live: bool = False) -> str:
    """The page, which loads plotly.min.js from beside it. Everything that comes from files is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    own = {kind: Markup(Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8")) for kind in ("css", "js")}
    templates.filters["figure"] = figure
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and the order of the bars stays
    keys = sorted({key for run in runs for key in run.settings if key != "run"})
    settings = {key: [run.settings.get(key, "") for run in runs] for key in keys}
    differing = {key: values for key, values in settings.items() if len(set(values)) > 1}
    newest = {(run.name, n): m for run in runs for e in run.evaluations for n, m in e["results"].items()}
    return templates.get_template("page.html").render(
        **own,
        runs=runs,
        data=curves(runs, expected) | {"live": live},
        typical=lambda run, key: medians(run.records, {"fields": {key: key}}).get(key),
        results=result_tables({f"{run}, {n}" if runs[1:] else n: metrics for (run, n), metrics in newest.items()}),
        differing=differing and side_by_side(differing, [run.name for run in runs]),
        shared={key: values[0] for key, values in settings.items() if key not in differing},
        galleries=[gallery for run in runs for gallery in galleries(run, 1 if runs[1:] else CHECKPOINTS)],
    )


def figure(value: float) -> str:
    """Four digits, with M or B for millions and billions."""
    scale, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M")) if abs(value) >= s), (1, ""))
    return f"{value / scale:,.0f}{unit}" if 1000 <= abs(value) < 1e6 else f"{value / scale:.4g}{unit}"


def side_by_side(settings: dict[str, list[str]], names: list[str]) -> TextTable:
    """Their values in each run, with a row for each run if there are more runs than settings."""
    table = [["run", *names], *([key, *values] for key, values in settings.items())]
    heads, *rows = zip(*table) if len(names) > len(settings) else table
    return TextTable(heads, [list(rows)])


def curves(runs: Sequence[Run], expected: str) -> Record:
    """What the page's script draws: `charts`, with a curve of each run, and `bars`."""
    parts, charts = max(100, POINTS // len(runs) // 2), []
    for chart in charts_of(runs, expected):
        tables = [points(run, chart) for run in runs]
        of_runs = [{"points": columns(thinned(t, parts)), "means": columns(means(t, parts))} for t in tables]
        charts.append(chart | {"runs": of_runs, "published": published(expected, chart, runs[0])})
    bars = [
        bar | {"runs": [(medians(r.records, bar), medians([r.predicted], bar)) for r in runs]}
        for bar in FIGURES["bars"]
    ]
    look = {key: FIGURES[key] for key in ("colours", "dashes")}
    return look | {
        "names": [run.name for run in runs],
        "charts": charts,
        "bars": [b for b in bars if any(m for m, _ in b["runs"])],
    }


def columns(table: np.ndarray) -> dict[str, list[float | None]]:
    """The columns of a curve with seven digits; null is a gap."""
    return {
        axis: [None if value != value else float(f"{value:.7g}") for value in column]
        for axis, column in zip(AXES, table.T.tolist())
    }


def galleries(run: Run, most: int) -> Iterator[Record]:
    """The retrieved pictures of at most so many checkpoints of each set, newest first, with `sheet` as an address."""
    last = run.records[-1]["step"]  # an interrupted run may have got further
    found = [gallery for gallery in read_galleries(run.folder)[::-1] if (gallery[0]["step"] or 0) <= last]
    for name in sorted({record["set"] for record, _ in found}):
        of_set = [gallery for gallery in found if gallery[0]["set"] == name]
        for record, sheet in of_set[:: -(-len(of_set) // most)]:
            file = io.BytesIO()
            sheet.save(file, "WEBP", quality=70)
            address = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
            rows = [row | {"caption": printable(row["caption"])} for row in record["rows"]]
            yield record | {"run": run.name, "rows": rows, "sheet": address, "width": sheet.width // record["tile"]}
