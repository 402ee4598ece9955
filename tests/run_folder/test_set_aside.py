"""A damaged file is set aside, and a file that a mistake of this program cannot read stays."""

from pathlib import Path
from typing import Any

import pytest

from clipscale import checkpoint
from clipscale.common import files
from clipscale.run_folder.paths import checkpoints_of
from clipscale.run_folder.records import read_evaluation, read_result
from clipscale.run_folder.set_aside import read_or_set_aside, set_aside_for_resume
from tests.support.checkpoints import ONE_RANK, save


@pytest.mark.parametrize("mistake", [AttributeError, TypeError, KeyError, IndexError])
def test_a_mistake_of_a_reader_is_not_taken_for_damage(tmp_path: Path, mistake: type[Exception]) -> None:
    def read(path: Path) -> Any:
        raise mistake(f"of the code that reads {path}")

    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(mistake):
        read_or_set_aside(tmp_path / "result.json", read)
    assert (tmp_path / "result.json").exists()


def test_a_mistake_of_the_check_of_a_checkpoint_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, {}, keep=0)
    monkeypatch.setattr("clipscale.checkpoint.loading.size_and_crc32", lambda file: file.missing)
    with pytest.raises(AttributeError):
        checkpoint.newest_undamaged(tmp_path, "auto", ONE_RANK)
    assert len(checkpoints_of(tmp_path)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "!!bool x",
        "!!timestamp x",
        "!!int ''",
        "a: !!float ''",
        "1: 2",
        "a: {b: {3: 4}}",
        "- 1",
        "a",
        "{a: [",
        "? {a: b}\n",
    ],
)
def test_yaml_of_another_form_is_set_aside(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert read_or_set_aside(file, files.read_record) is None
    assert not file.exists() and len([*tmp_path.glob("config.yaml.*.damaged")]) == 1


RESULTS = ["{}", "[]", '{"step": "2", "eval": {}}', '{"step": 2}', '{"step": 2, "eval": [1]}',
           '{"step": 2, "eval": {"birds": 1}}', '{"step": 2, "eval": {"birds": {"top1": "high"}}}']  # fmt: skip


@pytest.mark.parametrize("text", RESULTS)
def test_a_result_of_another_form_is_set_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    set_aside_for_resume(tmp_path, 0, starts_from_other_folder=False)
    assert [path.read_text() for path in tmp_path.glob("result.json.*.damaged")] == [text]
    (tmp_path / "result.json").write_text('{"step": 2, "eval": {"birds": {"top1": NaN, "loss": 1}}}')
    assert read_result(tmp_path / "result.json")["step"] == 2


@pytest.mark.parametrize("text", ['{"results": []}', '{"results": {"birds": 1}}', '{"measured": {"birds": null}}'])
def test_an_evaluation_of_another_form_is_set_aside(tmp_path: Path, text: str) -> None:
    file = tmp_path / "step_00000001.json"
    file.write_text(text)
    assert read_or_set_aside(file, read_evaluation) is None and not file.exists()
