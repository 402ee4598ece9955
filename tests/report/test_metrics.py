"""The metric log: what is written, what a resumed run cuts off, and that a failing sink costs a run nothing but a warning."""

import errno
import io
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.sections import LogConfig
from clipscale.report import sinks
from clipscale.report.metrics import MetricLog, console_line, read_metrics

SETTINGS = "batch: 256\nmodel:\n  name: ViT-B-32\n"


def quiet(**options: bool) -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False, soft_wrap=True, emoji=False, **options)  # type: ignore[arg-type]


def printed(log: MetricLog) -> str:
    assert isinstance(log.console.file, io.StringIO)
    return log.console.file.getvalue()


def open_log(run: Path, config: LogConfig | None = None, *, resume_step: int = 0, terminal: bool = False) -> MetricLog:
    console = quiet(force_terminal=terminal)
    return MetricLog(
        run, config or LogConfig(), resolved_config=SETTINGS, resume_step=resume_step, total_steps=10, console=console
    )


def record(step: int, **fields: object) -> dict[str, object]:
    plain = {"step": step, "samples": 256 * step, "loss": 5 / step, "lr": 1e-3, "samples_per_s": 440.0, "broken": 0}
    return plain | fields


def steps(run: Path) -> list[int]:
    return [r["step"] for r in read_metrics(run / "metrics.jsonl")]


def test_reasons_are_kept_in_the_record_and_left_out_of_the_curves(tmp_path: Path) -> None:
    reasons = {"unreadable_image": 3, "filter_min_side": 1}
    with open_log(tmp_path / "run", LogConfig(tensorboard=True)) as log:
        log.step(record(1, broken=4, broken_by=reasons))
        assert "warning" not in printed(log) and "filter_min_side" not in printed(log), printed(log)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["broken_by"] == reasons


def test_one_line_a_step_and_the_files_beside_it(tmp_path: Path) -> None:
    with open_log(tmp_path / "run") as log:
        for step in range(1, 4):
            log.step(record(step))
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [record(step) for step in range(1, 4)]
    assert (tmp_path / "run" / "config.yaml").read_text() == SETTINGS
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    assert env["versions"]["torch"] and env["hostname"] and env["command"] and "commit" in env


def test_resuming_cuts_off_what_lies_beyond_and_a_torn_last_line(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        for step in range(1, 8):
            log.step(record(step))
            assert steps(tmp_path)[-1] == step, "a killed run must not lose the steps it has done"
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    for resumed in (6, 4):
        with open_log(tmp_path, resume_step=resumed) as log:
            log.step(record(resumed + 1, loss=0.5))
    assert steps(tmp_path) == [1, 2, 3, 4, 5] and read_metrics(path)[-1]["loss"] == 0.5


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    for _ in range(2):
        with open_log(tmp_path) as log:
            log.step(record(1))
    assert steps(tmp_path) == [1]


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        open_log(tmp_path, resume_step=3)


def test_values_that_are_no_numbers_survive_strict_json(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(record(1, loss=math.nan, grad_norm=math.inf, mfu=None))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (back,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(back["loss"]) and back["grad_norm"] == math.inf and back["mfu"] is None


def test_console_line_is_greppable() -> None:
    line = console_line(record(12, loss=2.5, mem_peak_bytes=None))
    assert line == "step=12 samples=3072 loss=2.5000 lr=1.000e-03 samples_per_s=440.0 broken=0"


def test_console_lines_are_whole_and_plain(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(record(1, logit_scale=14.3, grad_norm=1.0, data_wait_frac=0.0, step_s=0.5, mem_peak_bytes=2**33))
        log.eval(1, {"a:set": {"top1": 0.5, "images": 10}})
        log.message("[done] :tada:")
    lines = printed(log).splitlines()
    assert len(lines) == 3, f"lines longer than the console must not be broken: {lines}"
    assert lines[0].endswith("mem_peak_bytes=8589934592 broken=0")
    assert lines[1:] == ["eval step=1 set=a:set top1=0.5000 images=10", "[done] :tada:"]


def test_only_every_nth_line_and_the_last_are_printed(tmp_path: Path) -> None:
    with open_log(tmp_path, LogConfig(every=3)) as log:
        for step in range(1, 9):
            log.step(record(step))
    assert [line.split()[0] for line in printed(log).splitlines()] == ["step=3", "step=6", "step=8"]
    assert steps(tmp_path) == list(range(1, 9))


def test_progress_bar_only_on_a_terminal(tmp_path: Path) -> None:
    for terminal in (True, False):
        with open_log(tmp_path, terminal=terminal) as log:
            log.step(record(1))
        assert ("1/10" in printed(log)) == terminal
        assert "step=1 samples=256" in printed(log)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write there"):
        open_log(tmp_path / "file")


def test_lines_wait_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(record(1))
        file = log._file
        log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, PTH123
        log.step(record(2))
        log.step(record(3))
        assert printed(log).count("warning: /dev/full cannot be written (No space left on device)") == 1, printed(log)
        log._file.close()
        log._file = file
        log.step(record(4))
    assert steps(tmp_path) == [1, 2, 3, 4]


class Stale(io.FileIO):
    """A file whose server has forgotten it."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_that_its_server_has_forgotten_is_opened_again(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(record(1))
        log._file.close()
        log._file = Stale(tmp_path / "metrics.jsonl", "ab")
        log.step(record(2))
        assert "metrics.jsonl cannot be written (Stale file handle); its lines wait in memory\n" in printed(log)
        log.step(record(3))
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("name", ["metrics", "env", "config"])
def test_a_disk_that_is_full_at_a_resumption_loses_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_log(tmp_path) as log:
        log.step(record(1))
    config = (tmp_path / "config.yaml").read_text()
    whole = files.replacing

    def full(path: Path, **options: Any) -> Any:
        return Path("/dev/full").open("wb") if path.stem == name else whole(path, **options)

    monkeypatch.setattr(files, "replacing", full)
    with pytest.raises(UserError, match=r"cannot write there \(No space left on device\)"):
        open_log(tmp_path, resume_step=1)
    assert (tmp_path / "config.yaml").read_text() == config
    assert json.loads((tmp_path / "env.json").read_text())
    assert steps(tmp_path) == [1]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    with open_log(tmp_path, LogConfig(tensorboard=True)) as log:
        for step in range(1, 6):
            log.step(record(step))
        log.eval(5, {"objects": {"top1": 0.25}})
    with open_log(tmp_path, LogConfig(tensorboard=True), resume_step=3) as log:
        log.step(record(4, loss=9.0))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert found == [(step, pytest.approx(value)) for step, value in [(1, 5.0), (2, 2.5), (3, 5 / 3), (4, 9.0)]]
    assert "eval/objects/top1" in events.Tags()["scalars"]


class Broken:
    """A sink that fails at the second record."""

    def __init__(self, *_: object) -> None:
        self.calls = 0

    def write(self, step: int, values: dict[str, float]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ConnectionError("nobody answers")

    def close(self) -> None:
        raise AssertionError("a failed sink is not closed")


def test_a_failing_sink_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_TensorBoard", Broken)
    with open_log(tmp_path, LogConfig(tensorboard=True, every=100)) as log:
        for step in range(1, 6):
            log.step(record(step))
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    warnings = [line for line in printed(log).splitlines() if "warning" in line]
    assert warnings == ["warning: tensorboard failed and is off from here on (ConnectionError: nobody answers)"]


def test_a_sink_that_cannot_open_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with open_log(tmp_path, LogConfig(tensorboard=True)) as log:
        log.step(record(1))
    assert printed(log).count("warning: tensorboard failed") == 1 and steps(tmp_path) == [1]


@pytest.fixture
def wandb_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's files in the test's own folder; a server that nobody answers at, so that any use of the network would fail."""
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.mark.usefixtures("wandb_at_home")
def test_wandb_offline_needs_no_network_and_goes_on_with_its_run(tmp_path: Path) -> None:
    config = LogConfig(wandb="offline")
    with open_log(tmp_path / "run", config) as log:
        for step in range(1, 4):
            log.step(record(step))
        log.eval(3, {"objects": {"top1": 0.5}})
    with open_log(tmp_path / "run", config, resume_step=2) as log:
        log.step(record(3))
    assert "warning" not in printed(log), printed(log)

    identity = (tmp_path / "run" / "wandb" / "run-id.txt").read_text().strip()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(identity in file.name for file in files), files
    rows, settings = contents(files[0])
    assert [r["loss"] for r in rows if "loss" in r] == [5.0, 2.5, pytest.approx(5 / 3)]
    assert [r["step"] for r in rows] == [1, 2, 3, 3] and rows[-1]["eval/objects/top1"] == 0.5
    assert settings["model"] == yaml.safe_load(SETTINGS)["model"]


def contents(file: Path) -> tuple[list[dict[str, float]], dict[str, object]]:
    """History rows and settings of an offline run's record."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, settings = [], {}
    for data in offline_records(file.read_bytes()):
        item = Record.FromString(data)
        if item.WhichOneof("record_type") == "history":
            pairs = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in item.history.item}
            rows.append({k: v for k, v in pairs.items() if not k.startswith("_")})
        elif item.WhichOneof("record_type") == "run":
            settings |= {i.key: json.loads(i.value_json) for i in item.run.config.update}
    return rows, settings


def offline_records(data: bytes) -> Iterator[bytes]:
    """wandb keeps LevelDB's log format: blocks of 32 KiB; pieces of records with checksum, length, and which piece it is."""
    block, place, parts = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""
