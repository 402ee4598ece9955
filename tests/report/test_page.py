"""The report of a run: its picture shows the data, and its page is self-contained."""

import json
import math
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.sections import LogConfig
from clipscale.report.metrics import MetricLog
from clipscale.report.page import write_report
from clipscale.report.plots import with_mean


def make_run(run: Path, losses: list[float], **extra: float | None) -> Path:
    with MetricLog(run, LogConfig(every=10**6), resolved_config="model: {name: '<tiny>'}\nbatch: 256\n") as log:
        for step, loss in enumerate(losses, 1):
            log.step({"step": step, "samples": 256 * step, "loss": loss, "samples_per_s": 400.0, **extra})
    return run


def add_evaluation(run: Path, step: int, top1: float) -> None:
    (run / "eval").mkdir(exist_ok=True)
    results = {"objects": {"top1": top1, "images": 10, "broken": 0}}
    (run / "eval" / f"step_{step:08d}.json").write_text(json.dumps({"step": step, "seconds": 1, "results": results}))


def pictures(html: str) -> list[bytes]:
    return [b64decode(data) for data in re.findall(r"data:image/png;base64,([^']+)'", html)]


def test_the_page_has_curves_and_results_and_is_self_contained_and_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [5 / step for step in range(1, 31)], host_rss_bytes=2**30)
    add_evaluation(run, 10, 0.2)
    add_evaluation(run, 30, 0.875)
    add_evaluation(run, 60, 0.999)  # left by an interrupted run that got further
    text = write_report(run).read_text()
    assert not re.search(r"(src|href)=['\"](?!data:)", text)
    assert ">87.5<" in text and ">99.9<" not in text
    assert "&lt;tiny&gt;" in text and "<tiny>" not in text
    assert "30 steps, 7,680 samples" in text
    assert pictures(text) == [(run / "report.png").read_bytes()]
    with Image.open(run / "report.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    blue = (abs(pixels - [0x1F, 0x77, 0xB4]).max(-1) < 40).sum()
    assert pixels.shape == (768, 1320, 3) and blue > 1000, f"{blue} pixels of curves in {pixels.shape}"


def test_retrieved_examples_have_a_frame_around_the_right_image(tmp_path: Path) -> None:
    run, tile = make_run(tmp_path / "run", [1.0]), 16
    folder = run / "eval" / "retrieved"
    folder.mkdir(parents=True)
    Image.new("RGB", (6 * tile, 2 * tile), (200, 30, 160)).save(folder / "captions.png")
    rows = [{"caption": "costs $5 <b>", "hit": 3}, {"caption": "nowhere", "hit": None}]
    record = {"set": "captions", "step": 1, "tile": tile, "columns": 5, "rows": rows}
    (folder / "captions.json").write_text(json.dumps(record))
    text = write_report(run).read_text()
    assert "costs $5 &lt;b&gt;" in text
    for data, columns, framed in zip(pictures(text)[1:], (5, 6), (3, 5), strict=True):
        with Image.open(BytesIO(data)) as strip:
            assert strip.size == (columns * tile, tile)
            colours = [strip.getpixel((x * tile + 1, 1)) for x in range(columns)]
        assert [colour == (0x16, 0xA3, 0x4A) for colour in colours] == [x == framed for x in range(columns)]


@pytest.mark.parametrize("losses", [[5.0], [1.0] * 500, [math.nan, 3.0, math.inf, -1.0, 0.0]], ids=len)
def test_any_length_of_run_and_odd_values(tmp_path: Path, losses: list[float]) -> None:
    run = make_run(tmp_path / "run", losses, mem_peak_bytes=None, grad_norm=math.inf)
    assert write_report(run) == run / "report.html"


def test_a_run_without_steps_or_with_damaged_results_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no step"):
        write_report(tmp_path)
    run = make_run(tmp_path / "run", [1.0])
    add_evaluation(run, 1, 0.2)
    (run / "eval/step_00000001.json").write_text("{")
    with pytest.raises(UserError, match=r"step_00000001\.json .*; evaluate again"):
        write_report(run)


def test_the_mean_of_a_curve_stands_at_the_middle_of_its_values() -> None:
    curves = with_mean(range(80), [float(step) for step in range(80)])
    assert len(curves[""][0]) == 80
    assert list(curves["mean"][1][:2]) == [0.5, 1.5] and list(curves["mean"][0][:2]) == [1, 2]
