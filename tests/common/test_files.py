"""Files in a stranger's folder: nothing is written through a link, and nothing but a regular file is read."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.common.errors import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["symbolic", "dangling", "hard"])
def test_a_file_is_written_beside_a_link_that_has_its_name(tmp_path: Path, kind: str) -> None:
    target, path = tmp_path / "target", tmp_path / "folder" / "file"
    path.parent.mkdir()
    if kind != "dangling":
        target.write_text("theirs")
    path.hardlink_to(target) if kind == "hard" else path.symlink_to(target)
    files.write_text(path, "ours")
    assert path.read_text() == "ours" and path.is_file() and not path.is_symlink()
    assert (target.read_text() == "theirs") if kind != "dangling" else not target.exists()
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), files.replacing(path) as file:
        file.write(b"new")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_on_the_permissions(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "file", "")
        files.open_lock(tmp_path / "lock").close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "lock")] == [mode, mode]


def test_a_name_of_any_length_is_written(tmp_path: Path) -> None:
    files.write_text(tmp_path / ("ü" * 127), "long")
    assert names(tmp_path) == ["ü" * 127]


def test_what_a_killed_process_left_is_removed_but_not_what_is_being_written(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from clipscale import files\n"
    code += "with files.replacing(Path(sys.argv[1])) as file: os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False)
    (tmp_path / ".theirs-notes.tmp").touch()
    (left,) = (name for name in names(tmp_path) if name.startswith(".file-"))
    with files.replacing(tmp_path / "other") as file:
        files.remove_leftovers(tmp_path)
        assert names(tmp_path) == sorted([Path(file.name).name, ".theirs-notes.tmp"])
    assert left not in names(tmp_path)


def test_a_lock_is_neither_truncated_nor_reached_through_a_link(tmp_path: Path) -> None:
    target, lock = tmp_path / "target", tmp_path / "lock"
    target.write_text("theirs")
    for make in (lock.symlink_to, lock.hardlink_to):
        make(target)
        with pytest.raises(OSError):
            files.open_lock(lock)
        lock.unlink()
    lock.symlink_to(tmp_path / "dangling")
    with pytest.raises(OSError):
        files.open_lock(lock)
    assert target.read_text() == "theirs" and not (tmp_path / "dangling").exists()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(OSError):
        files.open_lock(lock)
    with files.open_lock(target) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert target.read_text() == "theirs"


def test_only_the_named_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    run = tmp_path / "run"
    run.symlink_to("real")
    assert files.inner_folder(run, "eval", "retrieved").is_dir()
    (run / "export").symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        files.inner_folder(run, "export", "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder", "link to a device"])
def test_only_regular_files_are_read_and_none_is_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError):
        files.opened(path)
    with pytest.raises(UserError, match=r"config: .*file|config: .*zero"), files.reported("config", path, "move it"):
        files.read_text(path)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    assert files.read_text(tmp_path / "link") == "content"


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        files.read_bytes(path, 4)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    with pytest.raises(OSError, match="more than"):
        files.read_bytes(path)
    with pytest.raises(OSError, match="more than"):  # a regular file of no size, which has more
        files.read_bytes("/proc/self/maps", 10)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000, '"\\ud800', "nan!", ""])
def test_text_that_is_no_json_is_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"set: .*file\.json .*; fetch it again"):  # noqa: SIM117
        with files.reported("set", path, "fetch it again"):
            files.read_json(path)
