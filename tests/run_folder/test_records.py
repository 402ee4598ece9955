"""A run's evaluations are read by their names."""

from pathlib import Path

from clipscale.common import files
from clipscale.run_folder.records import read_evaluations


def test_a_copy_that_somebody_left_beside_the_evaluations_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for name in ("step_00000100", "step_00000020", "step_00000100 (1)", "step_00000100.old", "step_best"):
        files.write_json(tmp_path / f"eval/{name}.json", {"results": {"set": {"top1": 0.5}}})
    assert [record["step"] for record in read_evaluations(tmp_path)] == [20, 100]
