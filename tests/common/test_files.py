"""Files are written as a whole or not at all; what cannot be read is one line."""

from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.common.errors import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), files.replacing(path) as file:
        file.write(b"new")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


def test_a_written_file_replaces_the_old_one(tmp_path: Path) -> None:
    for value in ({"a": 1}, ["b"]):
        files.write_json(tmp_path / ("ü" * 127), value)
        assert files.read_json(tmp_path / ("ü" * 127)) == value
    assert names(tmp_path) == ["ü" * 127]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '"\\ud800', "nan!", ""])
def test_text_that_is_no_json_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"set: .*file\.json .*; fetch it again"):  # noqa: SIM117
        with files.reported("set", path, "fetch it again"):
            files.read_json(path)


@pytest.mark.parametrize("text", ["", "a", "[1]", "a: [", "a: !!python/object:os.system x"])
def test_text_that_is_no_tree_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"it holds no|while|could not"):
        files.read_tree(tmp_path / "config.yaml")
