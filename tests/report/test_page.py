"""The report of a run: its picture shows the data, and its page is self-contained."""

import json
import math
import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.sections import LogConfig
from clipscale.report.evaluations import read_evaluations, read_galleries
from clipscale.report.metrics import MetricLog
from clipscale.report.page import write_report
from clipscale.report.plots import draw_quality, smoothed


def make_run(run: Path, steps: int, **extra: float | None) -> Path:
    with MetricLog(run, LogConfig(every=10**6), resolved_config="model: {name: '<tiny>'}\nbatch: 256\n") as log:
        for step in range(1, steps + 1):
            log.step({"step": step, "samples": 256 * step, "loss": 5 / step, "samples_per_s": 400.0, **extra})
    return run


def add_evaluation(run: Path, step: int, top1: float) -> None:
    (run / "eval").mkdir(exist_ok=True)
    results = {"objects": {"top1": top1, "images": 10, "broken": 0}}
    (run / "eval" / f"step_{step:08d}.json").write_text(json.dumps({"step": step, "seconds": 1, "results": results}))


def add_gallery(run: Path, rows: int, tile: int = 16) -> None:
    folder = run / "eval" / "retrieved"
    folder.mkdir(parents=True)
    Image.new("RGB", (6 * tile, rows * tile), (200, 30, 160)).save(folder / "captions.png")
    listed = [{"caption": f"costs $5 or $6, number {i}", "hit": None if i % 2 else i % 5} for i in range(rows)]
    record = {"set": "captions", "step": 3, "tile": tile, "columns": 5, "rows": listed}
    (folder / "captions.json").write_text(json.dumps(record))


def pixels(run: Path) -> np.ndarray:
    with Image.open(run / "report.png") as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_picture_has_the_expected_size_and_content(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 30, host_rss_bytes=2**30, data_wait_frac=0.1)
    add_evaluation(run, 10, 0.2)
    add_evaluation(run, 30, 0.8)
    write_report(run)
    plain = pixels(run)
    assert plain.shape[1] == 1320 and 700 < plain.shape[0] < 900, plain.shape

    add_gallery(run, 5)
    write_report(run)
    rich = pixels(run)
    magenta = (abs(rich - [200, 30, 160]).max(-1) < 3).sum()
    assert rich.shape[1] == 1320 and rich.shape[0] > plain.shape[0] + 300, (plain.shape, rich.shape)
    # Five captions of five images, plus the correct one where it was not found, about 80 pixels a side.
    assert magenta > 27 * 70 * 70, f"{magenta} pixels of retrieved images"
    blue = (abs(rich - [0x25, 0x63, 0xEB]).max(-1) < 40).sum()
    assert blue > 500, f"{blue} pixels of the loss curve"
    green = (abs(rich - [0x16, 0xA3, 0x4A]).max(-1) < 3).sum()
    assert green > 500, f"{green} pixels of frames around the correct images"


@pytest.mark.parametrize("steps", [1, 2, 500])
def test_any_length_of_run(tmp_path: Path, steps: int) -> None:
    run = make_run(tmp_path / "run", steps, mem_peak_bytes=None, grad_norm=math.inf)
    assert write_report(run) == run / "report.html"


def test_odd_losses_are_drawn_too(tmp_path: Path) -> None:
    with MetricLog(tmp_path, LogConfig(), resolved_config="{}") as log:
        for step, loss in enumerate([math.nan, 3.0, math.inf, -1.0, 0.0], 1):
            log.step({"step": step, "loss": loss})
    assert write_report(tmp_path).is_file()


def test_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 30)
    add_evaluation(run, 30, 0.875)
    add_evaluation(run, 60, 0.999)  # left by an interrupted run that got further
    text = write_report(run).read_text()
    assert not re.search(r"(src|href)=['\"](?!data:)", text)
    assert ">87.5<" in text and ">99.9<" not in text
    assert "&lt;tiny&gt;" in text and "<tiny>" not in text
    assert "30 steps, 7,680 samples" in text
    (embedded,) = re.findall(r"data:image/png;base64,([^']+)'", text)
    assert b64decode(embedded) == (run / "report.png").read_bytes()


def test_a_run_without_steps_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no step"):
        write_report(tmp_path)


def test_damaged_results_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_evaluation(tmp_path, 10, 0.2)
    torn = tmp_path / "eval/step_00000020.json"
    torn.write_text((tmp_path / "eval/step_00000010.json").read_text()[:30])
    assert [record["step"] for record in read_evaluations(tmp_path)] == [10]
    assert f"{torn} is left out" in caplog.text
    (tmp_path / "eval/retrieved").mkdir()
    (tmp_path / "eval/retrieved/a.json").write_text('{"set": "a", "step": 1, "tile": 1, "columns": 1, "rows": []}')
    (tmp_path / "eval/retrieved/a.png").write_bytes(b"no picture")
    assert read_galleries(tmp_path, 2) == []


def test_smoothing_is_a_mean_that_ignores_gaps() -> None:
    values = np.array([1.0, 2.0, math.nan, 4.0, 9.0])
    assert smoothed(values, 3).tolist() == [1.5, 1.5, 3.0, 6.5, 6.5]
    assert smoothed(values[[0, 1, 3, 4]], 1).tolist() == [1, 2, 4, 9]
    assert np.allclose(smoothed(np.full(50, 2.5), 8), 2.5)


def test_every_evaluation_set_has_a_curve_that_differs_from_the_others() -> None:
    results = {f"set{number}": {"top1": number / 20} for number in range(20)}
    axes = Figure().subplots()
    draw_quality(axes, [{"step": step, "results": results} for step in (1, 2)], 2)
    styles = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(axes.lines) == len(styles) == 20
