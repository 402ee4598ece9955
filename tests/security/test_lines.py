"""Files of lines and small records in a received folder: each is bounded, a regular file, and no reason for a traceback."""

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clipscale.cli import sweep
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.sections import LogConfig
from clipscale.config.train import TrainConfig, changes_since
from clipscale.data import filters
from clipscale.data.shards import listing
from clipscale.data.tools import demo
from clipscale.models import description
from clipscale.report import evaluations, metrics, sinks
from clipscale.report.evaluations import read_galleries
from clipscale.report.metrics import MetricLog, read_metrics
from tests.data.files import picture
from tests.security.damage import WRONG
from tests.security.limits import bounded

QUIET = LogConfig(tensorboard=False, wandb="disabled", progress=False)


def sparse(path: Path, size: int) -> Path:
    """A file of zeros that takes no place on the disk."""
    with path.open("ab") as file:
        file.truncate(size)
    return path


def lines(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, count + 1)))
    return path


# -- metrics.jsonl -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 3])
def test_an_endless_line_of_metrics_is_one_message(tmp_path: Path, before: int) -> None:
    path = sparse(lines(tmp_path / "metrics.jsonl", before), 1 << 40)
    with bounded(grown=64 << 20), pytest.raises(UserError, match=f"line {before + 1} is not a JSON object with a step"):
        read_metrics(path)
    with bounded(grown=128 << 20), pytest.raises(UserError, match=f"line {before + 1} is not a JSON object"):
        MetricLog(tmp_path, QUIET, resolved_config="", resume_step=2)
    assert path.stat().st_size == 1 << 40, "what was there is kept"


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"step": 1, "x": [' + "[]," * 5000 + "[]]}", '{"step": ' + "9" * 5000 + "}"]
)
def test_a_hostile_record_is_one_message(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 2}}\n')
    with bounded(grown=64 << 20), pytest.raises(UserError, match="line 1 is not a JSON object with a step"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("count", [1, 2, 10, 999, 1000])
def test_of_many_records_every_second_or_fourth_is_kept(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "metrics.jsonl", count)
    monkeypatch.setattr(metrics, "MOST_BYTES", 3000)
    steps = [record["step"] for record in read_metrics(path)]
    assert steps[0] == 1 and steps[-1] == count and steps == sorted(set(steps))
    assert len(steps) * len('{"step": 1, "loss": 1.0}') < 3000 + 100
    apart = {after - before for before, after in pairwise(steps[:-1])}
    assert len(apart) <= 1, f"evenly spaced, but for the last: {apart}"


def test_a_resumed_run_keeps_its_lines_as_they_are(tmp_path: Path) -> None:
    text = lines(tmp_path / "metrics.jsonl", 5).read_text()
    with MetricLog(tmp_path, QUIET, resolved_config="", resume_step=3):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(text.splitlines(keepends=True)[:3])


# -- records -----------------------------------------------------------------------------------------------------------


def odd(path: Path, kind: str) -> Path:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        sparse(path, 1 << 40)
    else:
        path.write_text("a: &a [x, x]\n" + "".join(f"{n}: &{n} [*{p}, *{p}]\n" for p, n in zip("abcdefgh", "bcdefghi")))
    return path


@pytest.mark.parametrize("kind", ["fifo", "device", "large", "aliases"])
def test_settings_of_a_received_run_are_compared_or_left_out(tmp_path: Path, kind: str) -> None:
    with bounded(grown=64 << 20):
        assert changes_since(odd(tmp_path / "config.yaml", kind), TrainConfig()) == []


@pytest.mark.parametrize("kind", ["fifo", "device", "large", "aliases"])
def test_a_record_of_the_demo_set_is_read_or_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_write_all", lambda *_: None)
    odd(tmp_path / "recipe.json", kind)
    (tmp_path / "other").touch()
    with bounded(), pytest.raises(UserError, match=r"exists and is not a demo set|holds other"):
        demo.render_demo(tmp_path, train_samples=16)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_no_fifo_or_device_is_a_list_of_keys(tmp_path: Path, kind: str) -> None:
    with bounded(grown=64 << 20), pytest.raises((UserError, OSError)):
        filters._blocked((str(odd(tmp_path / "keys", kind)),))


def test_a_list_of_keys_may_have_an_endless_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n# two\n\nthree\n")
    sparse(path, 1 << 26)
    with bounded(grown=32 << 20):
        assert filters._blocks((str(path),), "one") and filters._blocks((str(path),), "three")
    assert not filters._blocks((str(path),), "two")


RESULT: dict[str, Any] = {"job": 0, "name": "a", "settings": "x", "loss": 1.0, "step": 2, "eval": {"s": {"top1": 0.5}}}
DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    key: lambda result, key=key: result | {key: {"x": {"y": "z"}}}  # type: ignore[misc]
    for key in RESULT
}


@pytest.mark.parametrize("key", DAMAGE)
def test_results_of_a_received_sweep_are_read_or_left_out(tmp_path: Path, key: str) -> None:
    for name, result in (("good", RESULT), ("bad", DAMAGE[key](RESULT))):
        (tmp_path / name).mkdir()
        (tmp_path / name / sweep.RESULT).write_text(json.dumps(result))
    (tmp_path / "worse").mkdir()
    os.mkfifo(tmp_path / "worse" / sweep.RESULT)
    with bounded():
        assert sweep.finished(tmp_path, {}) == [RESULT]
        assert (
            sweep.already_done(tmp_path / "bad", "x") is None and sweep.already_done(tmp_path / "good", "x") == RESULT
        )
        assert sweep.already_done(tmp_path / "worse", "x") is None
    sweep.table(sweep.finished(tmp_path, {}), tmp_path)


@pytest.mark.parametrize("value", [value for value in WRONG if value not in (0, 7, 1, 2**40)], ids=repr)
def test_a_result_is_an_object_with_a_job(tmp_path: Path, value: Any) -> None:
    (tmp_path / sweep.RESULT).write_text(json.dumps(value))
    assert sweep.already_done(tmp_path, "x") is None


# -- the id of wandb's run ---------------------------------------------------------------------------------------------


def test_a_link_in_the_place_of_wandbs_run_id_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("abc123\n")
    (tmp_path / "run-id.txt").symlink_to(tmp_path / "secret")
    assert sinks._run_id(tmp_path / "run-id.txt") != "abc123"
    assert not (tmp_path / "run-id.txt").is_symlink() and (tmp_path / "secret").read_text() == "abc123\n"


@pytest.mark.parametrize("text", ["", "x" * 99, "a b", "../../x", "\x1b]0;x", "A" * 1000])
def test_what_is_no_id_of_wandb_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "run-id.txt").write_text(text)
    made = sinks._run_id(tmp_path / "run-id.txt")
    assert made.isalnum() and made == sinks._run_id(tmp_path / "run-id.txt")


# -- lists of shards, counts and pictures of results ---------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"a.tar\n", b"#\n", b"\n"])
def test_a_list_of_shards_takes_no_more_than_its_file(
    tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty bytes of memory for each line would be thirty times as much."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tar").touch()
    (tmp_path / "list").write_bytes(line * (1 << 19))
    monkeypatch.setattr(listing, "MOST_SHARDS", 1000)
    with bounded(seconds=30, grown=16 << 20), pytest.raises(UserError, match=r"lists (more than 1000 shards|no shard)"):
        listing.expand("@list")


def test_an_endless_line_of_a_list_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# list\n")
    with bounded(grown=32 << 20), pytest.raises(UserError, match="a line has more than 65536 bytes"):
        listing.expand(f"@{sparse(tmp_path / 'list', 1 << 27)}")


@pytest.mark.parametrize("text", ["[" + "1," * 2000 + "1]", "{" + ",".join(f'"{n}":1' for n in range(2000)) + "}"])
def test_json_has_a_bounded_number_of_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_VALUES", 1000)
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match="more than 1000 values"):
            files.parse_json(given)


@pytest.mark.parametrize("part", ["[]", "{}", '[{"a":'])
def test_json_has_a_bounded_number_of_parts(part: str) -> None:
    """Each takes 56 bytes or more, for two of text."""
    text = part * (files.MOST_PARTS + 1)
    for given in (text, text.encode()):
        with bounded(seconds=10, grown=32 << 20), pytest.raises(ValueError, match="lists and objects"):
            files.parse_json(given)


def test_a_picture_of_results_has_bounded_pixels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record asks for a size, and 200 kB hold 180 million pixels of one colour."""
    folder = tmp_path / "eval/retrieved"
    folder.mkdir(parents=True)
    rows = [{"caption": "x", "hit": None}] * 2
    (folder / "s.json").write_text(json.dumps({"set": "s", "step": 1, "tile": 32, "columns": 2, "rows": rows}))
    (folder / "s.png").write_bytes(picture(0, (32 * 3, 32 * 2)))
    assert len(read_galleries(tmp_path, 2)) == 1
    monkeypatch.setattr(evaluations, "MOST_PIXELS", 6000)
    assert read_galleries(tmp_path, 2) == [] and "more than 6000 pixels" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
def test_a_tokenizers_folder_holds_files(tmp_path: Path, kind: str) -> None:
    """transformers would wait for a FIFO, and read the others without end."""
    odd(tmp_path / "tokenizer.json", kind)
    with bounded(grown=64 << 20), pytest.raises(UserError, match=r"tokenizer\.json"):
        description.source_of(str(tmp_path), hub=True)
