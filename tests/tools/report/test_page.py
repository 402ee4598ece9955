"""The report: every chart is drawn in a browser, peaks stay, tables hold what charts show, and names are text."""

import json
import math
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clipscale.cli.main import main
from clipscale.tools.report.charts import bin_means, thinned_rows
from clipscale.tools.report.page import short_paths, write_report
from tests.conftest import Capture
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.user_errors import refused

HOSTILE = "<img src=x onerror=alert(1)> costs $5"


def make_run(run: Path, losses: list[float | None], batch: int = 256, **extra: Any) -> Path:
    """A run's folder. `extra`: settings, by a dictionary, and fields of each record."""
    run.mkdir(parents=True, exist_ok=True)
    settings = {"model": {"name": HOSTILE}, "batch": batch, "run": str(run)}
    settings |= {name: extra.pop(name) for name in [*extra] if isinstance(extra[name], dict)}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    records = [{"step": n, "samples": batch * n, "batch": batch, "loss": x, **extra} for n, x in enumerate(losses, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def whole_run(run: Path, number: int = 0) -> Path:
    """A run that has something for every chart, and evaluations."""
    names = ("logit_scale", "lr", "grad_norm", "data_wait_frac", "mfu", "host_rss_bytes", "samples_per_s")
    rates = dict.fromkeys(("mem_peak_bytes", "samples_per_s_wall", "contrastive_loss", "caption_loss", *names), 1.5)
    make_run(run, [5 / n + number for n in range(1, 31)], 256 + number % 3, **rates)
    for step, top1 in ((10, 0.2), (30, 0.875), (60, 0.999)):  # the last is left by an interrupted run that got further
        evaluate(run, step, {"imagenet1k": {"top1": top1, "images": 10, "broken": 0}})
    return run


def evaluate(
    run: Path, step: int, results: dict[str, dict[str, float]], measured: dict[str, Any] | None = None
) -> None:
    (run / "eval").mkdir(exist_ok=True)
    record = {"results": results, "measured": measured or {}}
    (run / f"eval/step_{step:08d}.json").write_text(json.dumps(record))


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with browser() as opened:
        yield opened


@pytest.mark.slow  # a browser draws every chart
@pytest.mark.parametrize("count", [1, 3])
def test_every_chart_is_drawn_and_nothing_is_cut(page: Page, tmp_path: Path, count: int) -> None:
    runs = [whole_run(tmp_path / f"runs/a-run-of-a-sweep,batch=32k,seed={n}", n) for n in range(count)]
    (tmp_path / "sent").mkdir()
    html = write_report(runs).rename(tmp_path / "sent/alone.html")
    for width, dark in ((390, False), (1280, True)):
        page.show(html.as_uri(), width, dark=dark)
        if width == 390:
            assert page.value("document.documentElement.scrollHeight") < 2500 + 200 * count
            assert page.value("document.querySelectorAll('.modebar-btn').length") == 0, "nothing covers a curve"
            page.value("document.querySelector('.zoom[data-key=\"+\"]').click()")
            assert page.value("document.querySelector('.plot').layout.xaxis.range.length") == 2
            wide = "[...document.querySelectorAll('.scroll.wide')].filter((one) => one.checkVisibility()).length"
            assert (page.value(wide) > 0) == (count > 1), "a table that goes on says so"
        page.value("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        page.value("drawAll().then(() => 1)")
        if width == 1280 and count > 1:
            assert not page.value("document.querySelector('.runs').parentElement.matches('.wide')"), "runs are not cut"
        marks = "f.querySelectorAll('.scatterlayer path.js-line').length"
        drawn = page.value(f"[...document.querySelectorAll('.charts figure')].map((f) => {marks})")
        assert len(drawn) == 12 and min(drawn) >= count, drawn
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
    assert page.value(f"{change}.then(() => {ends})") == [[7680, 0.1666667] if count == 1 else [258 * 30, -3.386293]]
    assert page.errors == []


def test_tables_carry_what_charts_show_and_names_are_text(tmp_path: Path) -> None:
    for number in range(2):
        whole_run(tmp_path / f"runs/<b>{number}", number)
    html = write_report([tmp_path / "runs"])
    assert html == tmp_path / "runs/report.html" and "costs $5" in html.read_text()
    text = re.sub(r"<script>.*?</script>", "", html.read_text(), flags=re.S)
    assert re.findall(r"""(?:src|href)=['"](?!data:)(.*?)['"]""", text) == []
    assert "<img" not in text and "<b>" not in text
    assert ">87.5<" in text and ">99.9<" not in text
    cells = re.findall(r"<tr><td>&lt;b&gt;1</td>(.*?)</tr>", text.replace("\n", ""))
    assert "<td>0.4509</td><td>-4.382</td><td>0.4509</td><td>-4.382</td>" in cells, "first, lowest, highest, last loss"


def test_a_policy_admits_the_page_s_own_scripts_alone(tmp_path: Path) -> None:
    html = write_report([whole_run(tmp_path / "run")]).read_text()
    scripts = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    hashes = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    assert f"default-src 'none'; script-src {' '.join(hashes)}; style-src" in html.partition("<script>")[0]


def data_of(html: str) -> Any:
    """What the page's script draws."""
    return json.loads(html.split('<script id="data" type="application/json">')[1].split("</script>")[0])


def plain(html: str) -> str:
    """The page's text in one line."""
    return " ".join(unescape(re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", html, flags=re.S)).split())


def test_scores_come_first(tmp_path: Path) -> None:
    sizes = {"mem_peak_bytes": 1.5 * 2**30, "host_rss_bytes": 20.0 * 2**20}
    expected = {"imagenet1k.top1": [18.5, 20.0], "source": "a paper"}
    run = make_run(tmp_path / "a", [5.0, 4.0], 64, expected=expected, samples_per_s_wall=128 / 367, **sizes)
    evaluate(run, 2, {"imagenet1k": {"top1": 0.1996, "images": 10}, "mine": {"image_to_text_r1": 0.5, "loss": 2.0}})
    html = write_report([run]).read_text()
    text = plain(html)
    scores = "report a imagenet1k, top-1 20.0 % mine, image→text R@1 50.0 % mine, held-out loss 2 Loss 4 "
    assert f"{scores}Samples 128 Steps 2 Training time 6 min 7 s GPU memory 1.50 GiB Host memory 20.0 MiB" in text
    assert "published: imagenet1k top1 20.0 %, within 18.5 to 20 (a paper)" in text
    charts = data_of(html)["charts"]
    drawn = [chart["key"] for chart in charts if chart["drawn"]]
    assert drawn == ["loss", "mem_peak_bytes", "host_rss_bytes"], "one measured point is a number"


def test_a_captioners_losses_have_charts_of_their_own(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "a")
    records = [{"step": n, "samples": 8 * n, "batch": 8, "loss": 7.0, "contrastive_loss": 3.0 / n,
                "caption_loss": 2.0 * n} for n in (1, 2)]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    charts = {chart["key"]: chart for chart in data_of(write_report([run]).read_text())["charts"] if chart["drawn"]}
    curves = {key: charts[key]["runs"][0]["points"]["y"] for key in ("loss", "contrastive_loss", "caption_loss")}
    assert curves == {"loss": [7, 7], "contrastive_loss": [3, 1.5], "caption_loss": [2, 4]}
    assert charts["caption_loss"]["unit"] == "nats a token"


def test_written_captions_stand_below_their_pictures_and_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [5.0, 4.0])
    for step, caption in ((1, "a ring"), (2, HOSTILE)):
        row = {"picture": b64encode(b"picture").decode(), "caption": "a red ring", "written": caption}
        evaluate(run, step, {"pairs": {"perplexity": 3.25, "caption_loss": 1.18}}, {"pairs": {"written": [row]}})
    html = write_report([run]).read_text()
    assert f"written: pairs {HOSTILE} given: a red ring" in plain(html).replace("  ", " ")
    assert html.count("<img ") == 1 and f'src="data:image/jpeg;base64,{b64encode(b"picture").decode()}"' in html
    assert ">3.25<" in html and ">1.1800<" in html
    evaluate(run, 2, {"pairs": {"perplexity": 3.25}}, {"pairs": {"written": [{"picture": 3}]}})
    with refused("the runs' records"):
        write_report([run])


def test_several_runs_begin_with_a_table_of_their_ends(tmp_path: Path) -> None:
    for number in range(3):
        run = make_run(tmp_path / f"runs/r{number}", [5.0, 4.0], 64, data={"train": ["a", {"b": number}]})
        evaluate(run, 2, {"imagenet1k": {"top1": 0.18 + 0.01 * number}})
    html = write_report([tmp_path / "runs"]).read_text()
    assert '<dl class="facts">' not in html, "no lonely card"
    text = plain(html)
    assert "report 3 runs Runs run imagenet1k, top-1 r0 18.0 % r1 19.0 % r2 20.0 %" in text
    assert "The same in all: Loss 4 · samples 128 · steps 2 · time 0 s" in text
    assert "Settings that differ run data.train r0 [a,{b:0}] r1 [a,{b:1}] r2 [a,{b:2}] Axis" in text


def test_a_table_of_runs_has_the_columns_that_tell_them_apart(tmp_path: Path) -> None:
    """None that is empty or the same in all, and no score of a single try. Paths are short where they differ."""
    sets = ["[/data/a/imagenet1k,/data/coco]", "[/data/b/imagenet1k]", "[/data/b/imagenet1k]"]
    for number, paths in enumerate(sets):
        settings = {"sets": paths.strip("[]").split(",")}
        run = make_run(tmp_path / f"runs/r{number}", [5.0, 4.0 - number], 64, mfu=None, eval=settings)
        results = {"imagenet1k": {"top1": 0.18 + 0.01 * number, "mean_per_class_recall": 0.5}}
        evaluate(run, 2, results | ({"imagenet1k (limit 50)": {"top1": 0.5}} if number == 1 else {}))
    text = plain(write_report([tmp_path / "runs"]).read_text())
    assert "Runs run imagenet1k, top-1 Loss r0 18.0 % 4 r1 19.0 % 3 r2 20.0 % 2 The same in all: samples 128" in text
    assert "Of few runs, and below: imagenet1k (limit 50), top-1" in text
    assert "eval.sets r0 [imagenet1k,coco] r1 [imagenet1k] r2 [imagenet1k] Axis" in text
    assert "r1, imagenet1k (limit 50)" in text.split("Evaluation, newest")[1]
    assert text.count("Mean class recall: the share of a class") == 1
    assert short_paths(["/a/x", "/b/x"]) == ["/a/x", "/b/x"], "the folders tell them apart"


def test_a_card_says_how_many_captions_differ(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [5.0, 4.0], 64)
    metrics = {"image_to_text_r1": 0.5, "captions": 1936, "distinct": 64}
    evaluate(run, 2, {"mine": metrics, "coco": {"image_to_text_r1": 0.25, "captions": 10}})
    text = plain(write_report([run]).read_text())
    assert "mine, image→text R@1 50.0 % 1,936 captions, 64 distinct coco, image→text R@1 25.0 % Loss" in text


@pytest.mark.parametrize(("objective", "titles"), [("softmax_text", ["Loss less ln(batch)"]), ("sigmoid", [])])
def test_losses_of_different_batches_are_compared_less_ln_batch_or_not_at_all(
    tmp_path: Path, objective: str, titles: list[str]
) -> None:
    runs = [make_run(tmp_path / str(size), [math.log(size)], size, loss={"objective": objective}) for size in (64, 256)]
    html = write_report(runs).read_text()
    charts = [chart for chart in data_of(html)["charts"] if chart["key"] == "loss"]
    assert [chart["title"] for chart in charts] == titles, "and no column either"
    assert [run["points"]["y"] for chart in charts for run in chart["runs"]] == [[0.0], [0.0]][: 2 * len(titles)]
    assert ("Loss" in plain(html)) == bool(titles)


def test_peaks_survive_thinning() -> None:
    table = np.zeros((100_000, 4))
    table[:, 0] = np.arange(100_000)
    table[[40_123, 55_555, 70_001], 3] = 9.0, np.nan, -5.0
    kept = thinned_rows(table, 300)
    smooth = bin_means(table, 100)
    assert len(kept) < 610 and {40_123, 55_555, 70_001, 0, 99_999} <= {*kept[:, 0].astype(int)}
    assert (np.diff(kept[:, 0]) > 0).all()
    assert len(smooth) == 100 and smooth[40, 3] == pytest.approx(9 / 1000, rel=0.01)


@pytest.mark.parametrize("losses", [[5.0], [None, 3.0, None, -1.0, 0.0]], ids=len)
def test_any_length_of_run_and_odd_values(
    tmp_path: Path, losses: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "$a_b$", losses, mem_peak_bytes=None, grad_norm=math.inf)
    data = data_of(write_report([run], "out.html").read_text())
    assert data["charts"][0]["runs"][0]["points"]["y"] == losses


def test_a_missing_an_empty_and_a_damaged_run_are_refused(tmp_path: Path, capsys: Capture) -> None:
    run = make_run(tmp_path / "runs/run", [1.0])
    for words, answer in (
        ([f"run=[{run},{tmp_path}/gone]"], "there is no folder"),
        ([str(tmp_path / "runs"), "out=/proc/gone/a.html"], "out=FILE"),
    ):
        assert main(["report", *words]) == 2
        error = capsys.readouterr().err
        assert answer in error and error.count("\n") == 1, error
    (tmp_path / "runs/report.html").write_text("a thesis")
    with refused("somebody else's file.*out=FILE"):
        write_report([run, run])
    (tmp_path / "empty").mkdir()
    with refused("holds no step"):
        write_report([tmp_path / "empty"])
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "samples": 1, "batch": 1, "loss": 1{"0" * 400}}}\n')
    with refused("restore them"):
        write_report([run])
    (run / "eval").mkdir()
    (run / "eval/step_00000001.json").write_text("{")
    with refused(r"step_00000001\.json .*; evaluate again"):
        write_report([run])


@pytest.mark.parametrize(
    "kind", ["aliases", "lists", "pipe", "config.yaml", "env.json", "metrics.jsonl", "eval/step_1.json"]
)
def test_a_run_that_somebody_sent_names_no_other_file_and_takes_no_time(tmp_path: Path, kind: str) -> None:
    whole_run(run := tmp_path / "run")
    if kind == "aliases":
        lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
        (run / "config.yaml").write_text("\n".join(["a0: &a0 x", *lists]))
    elif kind == "lists":
        (run / "config.yaml").write_text("[" * 100_000)
    elif kind == "pipe":
        os.mkfifo(run / "env.json")
    else:
        (run / kind).unlink(missing_ok=True)
        (tmp_path / "secret").write_text('{"step": 1, "loss": 1}\n')
        (run / kind).symlink_to(tmp_path / "secret")
    with refused("lists of 100 levels|no regular file|leads out of its folder"):
        write_report([run])
