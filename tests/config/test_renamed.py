"""Old names of settings are accepted everywhere, with a notice."""

from dataclasses import asdict
from pathlib import Path

import pytest

from clipscale.cli.main import main
from clipscale.config.parse import typed
from clipscale.config.renamed import RENAMED, notice
from clipscale.config.tools import CheckSettings, PlanConfig
from clipscale.config.train import TrainConfig, changes_since, to_yaml


@pytest.fixture(autouse=True)
def _notices_appear_again() -> None:
    notice.cache_clear()


def test_every_new_name_is_declared_and_no_old_one() -> None:
    trees = [asdict(PlanConfig()), asdict(CheckSettings())]
    for old, new in RENAMED.items():
        assert any(holds(values, new) for values in trees), new
        assert not any(holds(values, old) for values in trees), old


def holds(values: object, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def test_a_stored_configuration_is_read_by_its_old_names(capsys: pytest.CaptureFixture[str]) -> None:
    read = typed(TrainConfig, {"data": {"lanes": 8}})
    assert read.data.shard_streams == 8
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("notice: data.lanes is now called data.shard_streams"), lines


def test_a_value_under_the_new_name_wins() -> None:
    assert typed(TrainConfig, {"data": {"lanes": 8, "shard_streams": 4}}).data.shard_streams == 4
    assert typed(TrainConfig, {"data": {"lanes": 8, "shard_streams": None}}).data.shard_streams == 8


def test_a_renamed_setting_is_no_change_of_a_resumed_run(tmp_path: Path) -> None:
    config, file = TrainConfig(batch=64), tmp_path / "config.yaml"
    before = to_yaml(config).replace("shard_streams:", "lanes:")
    assert "lanes:" in before and "shard_streams" not in before
    file.write_text(before)
    assert changes_since(file, config) == []
    config.data.shard_streams = 4
    assert changes_since(file, config) == ["data.shard_streams None -> 4"]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_the_command_line_takes_an_old_name(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{prefix}data.lanes=8", "--cfg", "job", "-p", "data"]) == 0
    out, err = capsys.readouterr()
    assert "shard_streams: 8\n" in out and "lanes:" not in out
    assert err == "notice: data.lanes is now called data.shard_streams; the next release refuses the old name\n"


def test_an_experiment_file_takes_an_old_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ndata:\n  lanes: 3\n")
    words = ["--config-dir", str(tmp_path), "experiment=mine", "data.train=x.tar", "batch=10", "launch.procs=3"]
    assert main(["train", *words]) == 2, "the batch ends it, after the settings have been read"
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("notice: data.lanes is now called data.shard_streams"), err
    assert err[1].startswith("error: batch=10 cannot be shared evenly"), err


def test_tools_without_a_file_take_an_old_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "a.tar", "near=perhaps"]) == 2
    notice_line, error = capsys.readouterr().err.splitlines()
    assert notice_line.startswith("notice: near is now called near_duplicates")
    assert error == "error: near_duplicates=perhaps: give true or false"
