"""Files are written as a whole or not at all."""

import os
from pathlib import Path

import pytest
import yaml

from clipscale.common import files


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / ("ü" * 127)
    files.write_json(path, {"a": 1})
    old = path.read_bytes()
    with pytest.raises(error), files.replacing(path) as file:
        file.write(b"new")
        raise error
    assert [path] == list(tmp_path.iterdir()) and path.read_bytes() == old
    files.write_json(path, ["b"])
    assert [path] == list(tmp_path.iterdir()) and path.read_text() == '[\n "b"\n]\n'


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: order.append(Path(f"/proc/self/fd/{number}").read_text()))
    monkeypatch.setattr(Path, "replace", lambda path, target: order.append(target.name))
    files.write_text(tmp_path / "a", "text")
    assert order == ["text", "a"]


def test_paths_that_are_not_utf8_have_file_names_of_their_own() -> None:
    names = {files.file_name(path) for path in ("/w/caf\udce9.pt", "/w/caf\udce8.pt", "/w/caf.pt")}
    assert len(names) == 3 and all(name.isascii() and "/" not in name for name in names), names


@pytest.mark.parametrize("name", ["caf\udce9.tar", "é\u2028😀", "a: 'b' # \n"])
def test_yaml_reads_back_any_name_of_a_file(name: str) -> None:
    """Bytes that are no UTF-8 are lone surrogates."""
    assert files.parse_yaml(yaml.safe_dump({"name": name}, allow_unicode=True)) == {"name": name}
