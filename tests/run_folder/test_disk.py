"""Unfinished files of a dead run are removed, and a user's files stay."""

from pathlib import Path

from clipscale.run_folder.disk import remove_temporary
from tests.support.checkpoints import save


def test_what_a_dead_run_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, keep=0)
    users = "thesis.tmp/a notes.tmp .notes-0123456789abcdef.tmp checkpoints/mine.tmp/a checkpoints/step_3.mine.tmp"
    ours = "checkpoints/step_00000002.tmp/a checkpoints/step_00000000.old.tmp/a .metrics.jsonl-0123456789abcdef.tmp"
    for name in f"{users} {ours}".split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    remove_temporary(tmp_path)
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert {name for name in files if "step_00000001" not in name} == {*users.split()}
