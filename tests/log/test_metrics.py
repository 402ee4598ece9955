"""The metric log: what is written, what a resumed run cuts off, and that a failing sink costs only a warning."""

import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clipscale.common import files
from clipscale.config.sections import SinkConfig
from clipscale.log import metrics, sinks
from clipscale.log.metrics import MetricLog, console_line, duration
from clipscale.log.warnings import warnings_of
from clipscale.run_folder.records import read_metrics
from tests.conftest import Capture

SETTINGS = "batch: 256\nmodel:\n  name: ViT-B-32\n"


def printed(capsys: Capture) -> list[str]:
    """Lines without the time of day, with which they begin."""
    times, lines = zip(*(line.split(" ", 1) for line in capsys.readouterr().out.splitlines()))
    assert all(re.fullmatch(r"[0-2]\d:[0-5]\d:[0-5]\d", clock) for clock in times), times
    return [*lines]


def open_log(run: Path, **options: Any) -> MetricLog:
    return metrics.open_log(run, settings=SETTINGS, **{"total": 1000} | options)


def logged(run: Path, steps: Iterable[int], options: dict[str, Any] | None = None, **fields: object) -> str:
    """What a log of these steps prints."""
    with redirect_stdout(io.StringIO()) as out, closing(open_log(run, **options or {})) as log:
        for step in steps:
            log.log_step(record(step, **fields))
    return out.getvalue()


def record(step: int, **fields: object) -> dict[str, object]:
    plain = {
        "step": step,
        "samples": 256 * step,
        "batch": 256,
        "loss": 5 / step,
        "lr": 1e-3,
        "samples_per_s": 440.0,
        "broken": 0,
    }
    return plain | fields


def steps(run: Path) -> list[int]:
    return [r["step"] for r in read_metrics(run / "metrics.jsonl")]


def test_one_line_a_step_and_the_files_beside_it(tmp_path: Path) -> None:
    reasons = {"unreadable_image": 3, "filter_min_side": 1}
    lines = logged(tmp_path / "run", range(1, 4), {"tensorboard": True}, broken_by=reasons)
    assert "warning" not in lines, "a record may hold more than numbers"
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [record(s, broken_by=reasons) for s in range(1, 4)]
    assert (tmp_path / "run" / "config.yaml").read_text() == SETTINGS
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    assert env["versions"]["torch"] and env["hostname"] and env["command"] and "commit" in env


def test_a_folder_in_the_place_of_a_record_is_set_aside(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "env.json", "config.yaml"):
        (tmp_path / name / "mine").mkdir(parents=True)
    logged(tmp_path, [1])
    assert steps(tmp_path) == [1] and len([*tmp_path.glob("*.damaged/mine")]) == 3


def test_resuming_cuts_off_what_lies_beyond_and_a_torn_last_line(tmp_path: Path) -> None:
    with closing(open_log(tmp_path)) as log:
        for step in range(1, 8):
            log.log_step(record(step))
            assert steps(tmp_path)[-1] == step, "a killed run must not lose the steps it has done"
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    for resumed in (6, 4):
        with closing(open_log(tmp_path, resume_step=resumed)) as log:
            log.log_step(record(resumed + 1, loss=0.5))
    assert steps(tmp_path) == [1, 2, 3, 4, 5] and read_metrics(path)[-1]["loss"] == 0.5
    logged(tmp_path, [1])
    assert steps(tmp_path) == [1], "a new run starts a new file"


def test_console_lines_are_greppable_whole_and_plain(tmp_path: Path, capsys: Capture) -> None:
    with closing(open_log(tmp_path, total=3)) as log:
        log.log_step(record(1, loss=math.nan, grad_norm=math.inf, data_wait_frac=0.0, step_s=0.5, mem_peak_bytes=2**33))
        log.log_evaluation(1, {"a:set": {"top1": 0.5, "images": 10}})
        log.log_step(record(2, data_wait_frac=0.3, broken=2))
        log.log_evaluation(2, {})
        log.log_step(record(3))
    lines = printed(capsys)
    assert lines == [
        "step=1 loss=nan lr=1.0e-03 grad=inf rate=440",
        "eval step=1 set=a:set top1=0.5000",
        "step=2 loss=2.5000 lr=1.0e-03 rate=440 left=0m00s wait=30% broken=2",  # before its evaluation
        "step=3 loss=1.6667 lr=1.0e-03 rate=440 left=0m00s",
    ]
    line, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    back = json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert back["loss"] is None and back["grad_norm"] is None and back["step_s"] == 0.5


def test_a_line_of_a_large_run_fits_100_columns_and_has_no_value_twice() -> None:
    large = {"logit_scale": 100.0, "grad_norm": 0.1234, "samples_per_s": 123456.7, "samples_per_s_per_gpu": 123456.7}
    line = console_line(record(123456, **large, mfu=0.4, mem_peak_bytes=2**36, broken=1234, faults=0, left="12h12m"))
    assert len("12:00:00 " + line) <= 100, line
    values = [field.partition("=")[2] for field in line.split()]
    assert len(values) == len({*values}) and "0" not in values, line


def test_lines_say_how_far_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Steps take four seconds. The first one, every other one after ten seconds, and the last one have a line."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with closing(open_log(tmp_path, every=2, total=2000)) as log:
        for step in range(1, 10):
            clock[0] += 4
            log.log_step(record(step))
    lines = printed(capsys)
    assert [line.split()[0] for line in lines] == ["step=1", "step=4", "step=8", "step=9"]
    assert "left" not in lines[0] and lines[2].endswith("left=2h12m")
    assert [duration(seconds) for seconds in (7, 3599.6, 86400)] == ["0m07s", "1h00m", "1d00h"]


SUSPECTS = files.read_yaml(Path(__file__).with_name("suspects.yaml"))


@pytest.mark.parametrize(("everywhere", "last", "kind", "cause"), SUSPECTS.values(), ids=SUSPECTS)
def test_each_fault_in_the_records_has_its_warning(everywhere: dict, last: dict, kind: str | None, cause: str) -> None:
    plain = {"batch": 256, "loss": 3.0, "lr": 1e-3, "logit_scale": 40.0, "data_wait_frac": 0.01, **everywhere}
    records = [plain | {"step": step, "loss": plain["loss"] + 0.01 * (step % 3)} for step in range(251, 301)]
    warnings = warnings_of([*records[:-1], records[-1] | last])
    assert list(warnings) == ([kind] if kind else []) and cause in "".join(warnings.values()), warnings
    assert not warnings_of([*records[:5], records[-1] | last]), "a few steps tell nothing"


@pytest.mark.parametrize("first", [1, 1000])
def test_a_warning_is_given_once_and_not_of_a_starts_first_steps(tmp_path: Path, first: int) -> None:
    lines = logged(tmp_path, range(first, first + 199), loss=1.0, data_wait_frac=0.4).splitlines()
    assert [line.split(": ")[1] for line in lines if "warning" in line] == [f"step {first + 59}"]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(open_log(tmp_path, tensorboard=True)) as log:
        for step in range(1, 6):
            log.log_step(record(step))
        log.log_evaluation(3, {"objects": {"top1": 0.25}})
    with closing(open_log(tmp_path, tensorboard=True, resume_step=3)) as log:
        log.log_step(record(4, loss=9.0))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {e.step: e.value for e in events.Scalars("loss")} == pytest.approx({1: 5.0, 2: 2.5, 3: 5 / 3, 4: 9.0})
    assert "eval/objects/top1" in events.Tags()["scalars"]


def test_a_failing_sink_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(step: int, values: object) -> None:
        if step >= 2:
            raise ConnectionError("nobody answers")

    monkeypatch.setattr(sinks, "tensorboard", lambda *_: (write, lambda: None))
    lines = logged(tmp_path, range(1, 6), {"tensorboard": True, "every": 100})
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert lines.count("warning") == lines.count("warning: tensorboard failed and is off") == 1, lines
    assert "ConnectionError: nobody answers" in lines


@pytest.mark.parametrize(
    ("environment", "setting", "used"),
    [
        ("offline", "online", "offline"), ("online", "offline", "online"), ("disabled", "online", ""),
        ("dryrun", "online", "offline"), ("offline", "disabled", ""), ("offline", "offline", "offline"),
    ],
)  # fmt: skip
def test_wandbs_mode_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, environment: str, setting: str, used: str
) -> None:
    asked = []

    class Client:
        Settings = dict

        def init(self, mode: str, **_: object) -> "Client":
            asked.append(mode)
            return self

        def define_metric(self, *_: object, **__: object) -> None: ...

        finish = define_metric

    monkeypatch.setenv("WANDB_MODE", environment)
    monkeypatch.setattr(sinks, "wandb_module", Client)
    config = SinkConfig(wandb=setting)
    sinks.log_wandb_mode(setting, config.wandb_mode)
    sinks.open_sinks(tmp_path, config.wandb_mode, False, {}).close()
    assert asked == [used] * bool(used)
    assert ("WANDB_MODE" in capsys.readouterr().out) == (setting not in ("disabled", environment))


def test_a_service_that_is_silent_at_the_start_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def init(**_: object) -> None:
        time.sleep(1)
        raise TimeoutError("no answer")

    monkeypatch.setattr("clipscale.common.remote.ANNOUNCE_S", 0.05)
    monkeypatch.setattr(sinks, "wandb_module", lambda: SimpleNamespace(init=init, Settings=dict))
    sinks.open_sinks(tmp_path, "online", False, {}).close()
    assert "waiting for wandb" in capsys.readouterr().err


def test_wandb_is_found_where_the_program_has_hidden_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert sinks.wandb_module().Settings


@pytest.mark.slow  # it starts wandb's service
def test_wandb_offline_needs_no_network_and_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_RUN_GROUP", "a-sweep")
    monkeypatch.setattr(sys, "argv", ["clipscale", "train", "data.train=https://bucket?key=typed"])
    monkeypatch.chdir(tmp_path)
    for words in (["init", "-q"], ["remote", "add", "origin", "https://user:a-token@example.org/private"]):
        subprocess.run(["git", *words], check=True)
    litter = tmp_path / "run/wandb/tmp/of-a-start-that-was-killed"
    litter.mkdir(parents=True)
    for resume_step in (0, 2):
        with closing(open_log(tmp_path / "run", wandb="offline", resume_step=resume_step)) as log:
            log.log_step(record(resume_step + 1))
            log.log_evaluation(resume_step + 1, {"objects": {"top1": 0.5}})
        assert "warning" not in (out := capsys.readouterr().out), out
    assert not litter.exists()
    identity = (tmp_path / "run" / "wandb" / "run-id.txt").read_text()
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 2 and all(identity in file.name for file in runs), runs
    words = (b"eval/objects/top1", b"loss", b"ViT-B-32", b"a-sweep")
    until = time.monotonic() + 20  # wandb's own process writes what is left after the run has ended here
    while not all(word in file.read_bytes() for file in runs for word in words):
        assert time.monotonic() < until, [file.read_bytes() for file in runs]
        time.sleep(0.1)
    written = [path.read_bytes() for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file()]
    # The folder's git remote, of which wandb itself leaves out the token alone, and the command line.
    for secret in (b"a-token", b"example.org", b"key=typed"):
        assert not any(secret in data for data in written), secret


def test_long_work_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """One case has ten parts of 25 seconds, the other ten of a millisecond."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with closing(open_log(tmp_path)) as log:
        for what, seconds in (("step 1", 0.001), ("step 2", 25.0)):
            for done in range(11):
                log.progress(what, done, 10)
                clock[0] += seconds
    lines = [f"step 2: {done} of 10, {10 * done}%, {timedelta(seconds=250 - 25 * done)} left" for done in (3, 6, 9)]
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()] == lines
