"""`clipscale report`: a page about runs that works offline, and their charts as a picture for papers."""

import base64
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import printable, say
from clipscale.config.tools import ReportSettings
from clipscale.report.charts import AXES, charts_of, draw, means, medians, points, thinned
from clipscale.report.runs import Record, Run, read_galleries, read_runs
from clipscale.report.table import FIGURES, result_tables

POINTS, CHECKPOINTS = 3000, 8
"""Of all curves in one chart, about; and the newest ones whose retrieved pictures a page of one run shows."""


def main(words: list[str], settings: ReportSettings) -> None:
    """Write the page or the picture and print its path, or serve the page. Raises UserError."""
    names = [*settings.run, *words]
    if not names:
        raise UserError("run is not set; give run=NAME, or several: clipscale report NAME...")
    if settings.live:
        serve(lambda: page(read_runs(names), settings.expected, live=True), settings.port)
    else:
        say(write_report(names, settings.out, settings.expected))


def write_report(names: Sequence[str | Path], out: str | None = None, expected: str = "") -> Path:
    """Write the page into the run's folder, or the one that holds all runs; or what `out` names. Returns its path.

    Raises UserError for runs without a step, and for what cannot be read or written.
    """
    runs = read_runs(names)
    above = os.path.commonpath([run.folder.resolve().parent for run in runs]) if runs[1:] else runs[0].folder
    path = Path(out).expanduser() if out else Path(above, "report.html")
    with files.reported("report", path, "give a place that can be written, out=FILE"):
        if path.suffix in (".png", ".pdf"):
            draw(runs, path)
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

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            local = self.headers.get("Host", "").rsplit(":", 1)[0] in ("127.0.0.1", "localhost")  # names may lie
            text = {"/": render, "/plotly.min.js": plotly}.get(self.path) if local else None
            self.send_response(200 if text else 404)
            self.end_headers()
            self.wfile.write(text().encode() if text else b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Answer) as server:
        say(f"http://127.0.0.1:{server.server_port} follows the run until Ctrl-C")
        server.serve_forever()


def page(runs: Sequence[Run], expected: str = "", *, live: bool = False) -> str:
    """The page, which loads plotly.min.js from beside it. Everything that comes from files is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    templates = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and the order of the bars stays
    keys = sorted({key for run in runs for key in run.settings if key != "run"})
    newest = {
        f"{r.name}, {n}" if runs[1:] else n: m for r in runs for e in r.evaluations for n, m in e["results"].items()
    }
    return templates.get_template("page.html").render(
        runs=runs,
        data=curves(runs, expected) | {"live": live},
        typical=lambda run, key: medians(run.records, {"fields": {key: key}}).get(key),
        results=result_tables(newest),
        settings={key: [run.settings.get(key, "") for run in runs] for key in keys},
        galleries=[gallery for run in runs for gallery in galleries(run, 1 if runs[1:] else CHECKPOINTS)],
        **{kind: Markup((here / f"page.{kind}").read_text(encoding="utf-8")) for kind in ("css", "js")},
    )


def curves(runs: Sequence[Run], expected: str) -> Record:
    """What the page's script draws: `charts`, with the columns of each run's curve, and `bars`."""
    parts = max(100, POINTS // len(runs) // 2)

    def columns(run: Run, chart: Record) -> Record:
        tables = {"points": thinned(points(run, chart), parts), "means": means(points(run, chart), parts)}
        digits = {
            of: [[None if v != v else float(f"{v:.7g}") for v in c] for c in t.T.tolist()] for of, t in tables.items()
        }
        return {of: dict(zip(AXES, values)) for of, values in digits.items()}

    charts = [chart | {"runs": [columns(run, chart) for run in runs]} for chart in charts_of(runs, expected)]
    bars = [b | {"runs": [[medians(r.records, b), medians([r.predicted], b)] for r in runs]} for b in FIGURES["bars"]]
    shown = {"charts": charts, "bars": [bar for bar in bars if any(measured for measured, _ in bar["runs"])]}
    return shown | {"names": [run.name for run in runs], **{key: FIGURES[key] for key in ("colours", "dashes")}}


def galleries(run: Run, most: int) -> Iterator[Record]:
    """The retrieved pictures of the newest checkpoints, so many of each set, with `sheet` as an address."""
    shown = Counter[str]()
    for record, sheet in reversed(read_galleries(run.folder)):
        # An interrupted run may have got further.
        if shown[record["set"]] < most and (record["step"] or 0) <= run.records[-1]["step"]:
            shown[record["set"]] += 1
            file = io.BytesIO()
            sheet.save(file, "WEBP", quality=70)
            address = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
            rows = [row | {"caption": printable(row["caption"])} for row in record["rows"]]
            yield record | {"run": run.name, "rows": rows, "sheet": address, "width": sheet.width // record["tile"]}
