"""The report: every chart is drawn in a browser, peaks stay, tables hold what charts show, and names are text."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.tools.report.page import means, thinned, write_report
from tests.support.browser import CHROMIUM, Page, browser

HOSTILE = "<img src=x onerror=alert(1)> costs $5"


def make_run(run: Path, losses: list[float | None], batch: int = 256, **extra: float | None) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"name": HOSTILE}, "batch": batch, "run": str(run)}))
    records = [{"step": n, "samples": batch * n, "batch": batch, "loss": x, **extra} for n, x in enumerate(losses, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def whole_run(run: Path, number: int = 0) -> Path:
    """A run that has something for every chart, and evaluations."""
    names = ("logit_scale", "lr", "grad_norm", "data_wait_frac", "mfu", "host_rss_bytes", "update_rms")
    rates = {"samples_per_s": 400.0, "samples_per_s_wall": 300.0}
    make_run(
        run,
        [5 / n + number for n in range(1, 31)],
        256 + number % 3,
        mem_peak_bytes=2.0**30,
        **dict.fromkeys(names, 1.5),
        **rates,
    )
    for step, top1 in ((10, 0.2), (30, 0.875), (60, 0.999)):  # the last is left by an interrupted run that got further
        (run / "eval").mkdir(exist_ok=True)
        results = {"imagenet1k": {"top1": top1, "images": 10, "broken": 0}}
        (run / f"eval/step_{step:08d}.json").write_text(json.dumps({"results": results}))
    return run


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("count", [1, 20])
def test_every_chart_is_drawn_and_nothing_is_cut(page: Page, tmp_path: Path, count: int) -> None:
    runs = [whole_run(tmp_path / f"runs/a-run-of-a-sweep,batch=32k,seed={n}", n) for n in range(count)]
    html = write_report(runs, expected="openclip-b32-2b")
    for width, dark in ((390, False), (1280, True)):
        page.show(html.as_uri(), width, dark=dark)
        page.value("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        marks = "f.querySelectorAll('.scatterlayer path.js-line').length"
        drawn = page.value(f"[...document.querySelectorAll('#charts figure')].map((f) => {marks})")
        assert len(drawn) == 11 and min(drawn) >= count, drawn
        assert page.value("document.documentElement.scrollWidth") <= page.value("innerWidth") == width
        cut = "one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('.scroll, .plot')"
        assert page.value(f"[...document.querySelectorAll('main *')].filter((one) => {cut}).map((one) => one.id)") == []
    buttons = page.value("[...new Set([...document.querySelectorAll('.modebar-btn')].map((one) => one.dataset.title))]")
    assert len(buttons) == 6 and not any("loud" in title for title in buttons), "no chart is sent to anyone"
    if count > 1:
        page.value("document.querySelector('#runs button').click()")
        assert page.value("document.querySelector('.plot').data.length") == count - 1
    range_ = "document.querySelector('.plot')._fullLayout.xaxis.range"
    before = page.value(range_)
    press = "document.querySelector('.plot').dispatchEvent(new KeyboardEvent('keydown', {key: '+'}))"
    after = page.value(f"{press}, new Promise((done) => setTimeout(() => done({range_}), 300))")
    assert after[1] - after[0] == pytest.approx(0.6 * (before[1] - before[0]))
    change = "id('axis').value = 'samples', id('smooth').value = 0, drawAll()"
    ends = "document.querySelector('.plot').data.slice(-1).map((trace) => [trace.x.at(-1), trace.y.at(-1)])"
    assert page.value(f"{change}.then(() => {ends})") == [[7680, 0.1666667] if count == 1 else [257 * 30, 19.16667]]
    assert page.errors == []


def test_tables_carry_what_charts_show_and_names_are_text(tmp_path: Path) -> None:
    for number in range(2):
        whole_run(tmp_path / f"runs/<b>{number}", number)
    html = write_report([tmp_path / "runs"], expected="openclip-b32-2b")
    assert html == tmp_path / "runs/report.html" and (html.parent / "plotly.min.js").stat().st_size > 10**6
    text = html.read_text()
    assert re.findall(r"""(?:src|href)=['"](?!data:)(.*?)['"]""", text) == ["plotly.min.js"]
    assert "<img" not in text and "<b>" not in text and "costs $5" in text
    assert ">87.5<" in text and ">99.9<" not in text
    cells = re.findall(r"<tr><td>&lt;b&gt;1</td>(.*?)</tr>", text.replace("\n", ""))
    assert cells[0] == "<td>6</td><td>1.167</td><td>6</td><td>1.167</td>", "first, lowest, highest, last loss"
    assert "<td>257</td>" in cells, "settings that differ"


def test_peaks_survive_thinning() -> None:
    table = np.zeros((100_000, 4))
    table[:, 0] = np.arange(100_000)
    table[[40_123, 55_555, 70_001], 3] = 9.0, np.nan, -5.0
    kept, smooth = thinned(table, 300), means(table, 100)
    assert len(kept) < 610 and {40_123, 55_555, 70_001, 0, 99_999} <= {*kept[:, 0].astype(int)}
    assert (np.diff(kept[:, 0]) > 0).all()
    assert len(smooth) == 100 and smooth[40, 3] == pytest.approx(9 / 1000, rel=0.01)


@pytest.mark.parametrize("losses", [[5.0], [None, 3.0, None, -1.0, 0.0]], ids=len)
def test_any_length_of_run_and_odd_values(
    tmp_path: Path, losses: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("$a_b$"), losses, mem_peak_bytes=None, grad_norm=math.inf)
    written = write_report([run], "out.html").read_bytes()
    data = json.loads(written.split(b'<script id="data" type="application/json">')[1].split(b"</script>")[0])
    assert data["charts"][0]["runs"][0]["points"]["y"] == losses


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs/run", [1.0])
    for words, answer in (
        ([f"run=[{run},{tmp_path}/gone]"], "there is no folder"),
        ([str(run), "expected=openclip-b33"], "choose openclip-b32-2b, "),
        ([str(tmp_path / "runs"), "out=/proc/gone/a.html"], "out=FILE"),
    ):
        assert main(["report", *words]) == 2
        error = capsys.readouterr().err
        assert answer in error and error.count("\n") == 1, error
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no step"):
        write_report([tmp_path / "empty"])
    (run / "eval").mkdir()
    (run / "eval/step_00000001.json").write_text("{")
    with pytest.raises(UserError, match=r"step_00000001\.json .*; evaluate again"):
        write_report([run])
