"""The verb: settings and mistakes, table, JSON and picture, from a small run on the CPU and from records made by hand."""

import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from clipscale.bench import present
from clipscale.bench.harness import Job
from clipscale.bench.loss import COLUMNS, LossPart, main, notes, plan
from clipscale.bench.loss_methods import Case, find, methods
from clipscale.bench.loss_work import LossWorker
from clipscale.cli import main as cli
from clipscale.common.errors import UserError
from clipscale.config.tools import LossBenchSettings
from tests.bench.measuring import in_process

Record = dict[str, Any]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, str, Path]:
    """A real run, done in this process: the record it saved, what it printed, and the folder."""
    out = tmp_path_factory.mktemp("bench")
    printed = io.StringIO()
    settings = LossBenchSettings(
        n="128", d="32", methods="infcl,triton,open_clip,inf_cl", device="cpu", repeats=3, out=str(out)
    )
    with pytest.MonkeyPatch.context() as patch:
        in_process(LossWorker, patch)
        patch.setattr("clipscale.bench.loss_work.GEMM_SIDE", {"cpu": 256})
        main(settings, Console(file=printed, width=200))
    return json.loads((out / "loss-cpu.json").read_text()), printed.getvalue(), out


def test_the_table_has_a_line_for_each_method_and_says_why_one_has_no_figures(small: tuple[Record, str, Path]) -> None:
    record, printed, out = small
    assert "need CUDA" in printed and "GEMM of side" in printed
    assert [row["method"] for row in record["rows"]] == ["infcl", "triton", "open_clip", "inf_cl"]
    status = {row["method"]: row["status"] for row in record["rows"]}
    assert (status["infcl"], status["open_clip"], status["triton"]) == ("ok", "ok", "not supported")
    assert status["inf_cl"] in ("not installed", "not supported")
    lines = (out / "loss-cpu.md").read_text().splitlines()
    assert lines[4].startswith("| 128 | 32 | fp32 | infcl | ") and {line.count("|") for line in lines[2:8]} == {14}
    assert lines[-1].startswith("- not measured: at most a twentieth") and record["targets"][0] in printed
    assert_drawn(out / "loss-cpu.png")


def test_figures_are_positive_and_agree_with_each_other(small: tuple[Record, str, Path]) -> None:
    record, _, _ = small
    (gemm,) = record["gemm"]
    flop = gemm["products"] * 2 * gemm["side"] ** 3
    assert len(gemm["seconds"]) == 6 and gemm["products"] > 1, "a burst after each of two methods in three rounds"
    assert gemm["flops_per_s"] == pytest.approx(flop / median(gemm["seconds"]))
    for row in record["rows"]:
        if row["status"] != "ok":
            continue
        for name in ("forward_s", "backward_s", "total_s"):
            times = row[name]
            assert len(times["all"]) == 3
            assert 0 < times["min"] <= times["median"] <= times["max"]
        assert row["total_s"]["all"] == [f + b for f, b in zip(row["forward_s"]["all"], row["backward_s"]["all"])]
        assert row["counted_flops"] == 4 * 2 * 128 * 128 * 32
        assert row["flops_per_s"] == pytest.approx(row["counted_flops"] / row["total_s"]["median"])
        assert row["gemm_fraction"] == pytest.approx(row["flops_per_s"] / gemm["flops_per_s"])
        assert row["extra_bytes"] >= 0
        assert 0 < row["error"] < 1e-5
        assert row["sent_bytes"] is None
    units = {row["method"]: row.get("units") for row in record["rows"]}
    assert (units["infcl"], units["open_clip"]) == (4, 6)


def test_the_record_says_what_it_ran_on(small: tuple[Record, str, Path]) -> None:
    record, _, out = small
    facts = record["machine"]
    assert facts["command"].startswith("clipscale bench loss n=128 d=32 methods=infcl,triton,open_clip,inf_cl")
    assert str(out) not in json.dumps(facts)
    assert all(facts[name] for name in ("cpu", "cpus", "memory_bytes", "python", "platform"))
    assert {"torch", "triton", "open_clip_torch", "clipscale"} <= set(facts["versions"])
    assert record["load_average_after"] is not None
    assert set(record["methods"]) == {"infcl", "triton", "open_clip", "inf_cl"}


def assert_drawn(path: Path) -> None:
    pixels = imread(path)[..., :3]
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000, pixels.shape
    coloured = float((np.ptp(pixels, axis=2) > 0.2).mean())
    assert 0.0003 < coloured < 0.5, f"{100 * coloured:.2f} % of the picture is coloured"


# ---- runs that are interrupted ----


def part_of(case: Case, names: str) -> LossPart:
    return LossPart(case, find(names.split(",")), LossBenchSettings())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What was timed, by a driver whose processes are made up; (512, ...) is interrupted."""
    timed: list[tuple[int, str]] = []

    def answer(target: str, job: Job, on_answer: Any) -> list[Record]:
        if job.about["case"]["n"] == 512 and job.timed:
            raise KeyboardInterrupt
        timed.extend((job.about["case"]["n"], name) for name in job.timed)
        probe = {"extra_bytes": 0, "sent_bytes": None, "units": 4.0, "error": None}
        found = {"status": "ok", "steps": [{"forward": 0.1, "backward": 0.2}] if job.timed else []} | probe
        gemm = {"side": 10, "products": 2, "seconds": [1.0] if job.timed else []}
        names = [*(name for name, _ in job.probed), *job.timed]
        return [{"cases": dict.fromkeys(names, found), "gemm": gemm}]

    monkeypatch.setattr("clipscale.bench.record.measure", answer)
    return timed


def test_a_record_is_resumed_and_measures_only_what_it_lacks(tmp_path: Path, measured: list[tuple[int, str]]) -> None:
    settings = LossBenchSettings(n="64,128", d="32", methods="infcl", device="cpu", repeats=1, out=str(tmp_path))
    main(settings, Console(file=io.StringIO()))
    assert measured == [(64, "infcl"), (128, "infcl")]
    measured.clear()
    again = replace(settings, n="128,256", methods="torch,infcl", resume=True)
    rows = main(again, Console(file=io.StringIO(), width=200))
    assert measured == [(128, "torch"), (256, "torch"), (256, "infcl")]
    assert [(row["n"], row["method"]) for row in rows] == [
        (64, "infcl"), (128, "torch"), (128, "infcl"), (256, "torch"), (256, "infcl"),
    ]  # fmt: skip
    assert len(json.loads((tmp_path / "loss-cpu.json").read_text())["gemm"]) == 4


def test_an_interruption_leaves_what_was_measured_before(tmp_path: Path, measured: list[tuple[int, str]]) -> None:
    settings = LossBenchSettings(n="64,512", d="32", methods="infcl", device="cpu", repeats=1, out=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        main(settings, Console(file=io.StringIO()))
    rows = json.loads((tmp_path / "loss-cpu.json").read_text())["rows"]
    assert [(row["n"], row["status"]) for row in rows] == [(64, "ok"), (512, "not run")]
    assert rows[1]["extra_bytes"] == 0, "its memory had been measured"
    assert "not run" in (tmp_path / "loss-cpu.md").read_text(), "the table is there too"


# ---- records made by hand ----


def by_hand(ranks: int = 1) -> Record:
    """One method measured, one that ran out of memory, one that is not there."""
    case = Case(1024, 512, "fp32", "cpu", ranks, 100.0)
    chosen = [methods()[name] for name in ("infcl", "clip", "inf_cl")]
    probe = {"status": "ok", "steps": [], "extra_bytes": 3 << 20, "units": 4 / ranks, "error": 1e-6}
    probe |= {"sent_bytes": None if ranks == 1 else 8 * 1024 * 512}
    slower = probe | {"extra_bytes": 5 << 20, "error": 5e-7}
    full = {"status": "out of memory", "reason": "can't allocate memory", "traceback": ""}
    memory = [{"cases": {"infcl": probe}}, {"cases": {"infcl": slower}}][:ranks]
    seconds = [[(0.5, 1.5), (0.5, 1.5), (0.5, 2.0)], [(0.6, 1.5), (0.4, 1.5), (0.5, 1.5)]][:ranks]
    times: list[dict[str, Any]] = [
        {"cases": {"infcl": {"status": "ok", "steps": [{"forward": f, "backward": b} for f, b in steps]}}}
        for steps in seconds
    ]
    for answer in times:
        answer["gemm"] = {"side": 1000, "products": 3, "seconds": [3.0, 6.0, 12.0]}
    for answer in (*memory, clip := {"cases": {"clip": full}}):
        answer["gemm"] = {"seconds": []}
    found = part_of(case, "infcl,clip,inf_cl").found([memory, [clip], times])
    facts = {"gpus": [], "cpu": "a processor", "cpus": 2, "versions": {"torch": "2"}}
    about = {method.name: method.about for method in chosen}
    return {
        "benchmark": "loss", "settings": {"ranks": ranks}, "machine": facts, "methods": about,
    } | found  # fmt: skip


def test_rates_by_hand() -> None:
    record = by_hand()
    row = record["rows"][0]
    assert row["total_s"]["median"] == 2.0
    assert row["counted_flops"] == 4294967296  # 4 * 2 * 1024 * 1024 * 512
    assert row["flops_per_s"] == 2147483648
    assert record["gemm"][0]["flops_per_s"] == 1e9  # 3 times 2 * 1000^3 in 6 s
    assert notes(record) == ["fp32 GEMM of side 1000: 0.001 to 0.001 TFLOP/s by case"]
    assert row["gemm_fraction"] == pytest.approx(2.147483648)


def test_of_several_ranks_the_slowest_and_the_fullest_count_and_the_work_is_summed() -> None:
    record = by_hand(2)
    row = record["rows"][0]
    assert row["forward_s"]["all"] == [0.6, 0.5, 0.5]
    assert row["total_s"]["all"] == [2.1, 2.0, 2.5]
    assert row["extra_bytes"] == 5 << 20
    assert row["units"] == 4
    assert row["sent_per_feature"] == 8.0
    assert row["error"] == 1e-6
    assert record["gemm"][0]["flops_per_s"] == 2e9
    assert present.cells(row, COLUMNS[-2:]) == ["4.00", "8.00"]


def test_a_method_out_of_memory_or_missing_is_a_line_that_says_so() -> None:
    record = by_hand()
    lines = [present.cells(row, COLUMNS) for row in record["rows"]]
    assert lines[1] == ["1k", "512", "fp32", "clip", "out of memory", *[""] * 10]
    assert lines[2][4].startswith("not ") and lines[2][5:] == [""] * 10


def test_the_picture_has_a_line_for_each_method_that_ran(tmp_path: Path) -> None:
    figure = present.draw(by_hand(), tmp_path / "x.png")
    titles = [axes.get_title(loc="left").split(",")[0] for axes in figure.axes]
    assert titles == ["forward + backward", "extra memory", "forward", "backward"]
    assert [float(axes.get_lines()[0].get_ydata()[0]) for axes in figure.axes] == [2000.0, 3.0, 500.0, 1500.0]


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": "5x"}, "n=5x.*is not a count"),
        ({"n": "0"}, "n=0: must be at least 1"),
        ({"n": ","}, "n is empty"),
        ({"d": "wide"}, "d=wide"),
        ({"dtype": "fp31"}, "dtype=fp31: unknown; did you mean 'fp3?"),
        ({"dtype": "tf32"}, "tf32: only CUDA"),
        ({"n": "65", "ranks": 2}, "n=65: does not divide among 2 ranks"),
        ({"scale": -1.0}, "scale=-1: must be positive"),
        ({"methods": "infcl,xyz"}, "methods=xyz: unknown; there are clip"),
    ],
)
def test_mistakes_in_the_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(LossBenchSettings(**{"device": "cpu"} | settings))
    assert "\n" not in str(caught.value)


def test_lists_make_every_combination() -> None:
    parts = plan(LossBenchSettings(n="1k,2k", d="512,768", dtype="fp32,bf16", device="cpu"))
    assert [part.case.n for part in parts] == [1024] * 4 + [2048] * 4, "the least work first"
    assert [method.name for method in parts[0].methods] == ["infcl", "dense", "open_clip", "torch"]


@pytest.mark.parametrize("words", [["bench"], ["bench", "tables"], ["bench", "loss", "methods=nonsense", "device=cpu"]])
def test_the_command_line_answers_mistakes_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    _, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
