"""Which folder of a run is meant."""

from pathlib import Path

import pytest

from clipscale.run_folder.paths import existing_run
from tests.support.user_errors import refused


def test_a_run_must_exist_and_a_sweep_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(rf"^run={tmp_path}/none: there is no folder {tmp_path}/none$"):
        existing_run(f"{tmp_path}/none")
    monkeypatch.chdir(tmp_path)
    Path("runs/first").mkdir(parents=True)
    with refused(r"^run=frist: there is no folder runs/frist; did you mean 'first'\?$"):
        existing_run("frist")
    for name in ("batch=64", "batch=128"):
        (tmp_path / "sizes" / name).mkdir(parents=True)
        (tmp_path / "sizes" / name / "config.yaml").write_text("")
    with refused(rf"^run={tmp_path}/sizes: a sweep of 2 runs; .*/sizes/batch=128$"):
        existing_run(f"{tmp_path}/sizes")
    assert existing_run(f"{tmp_path}/sizes/batch=64") == tmp_path / "sizes/batch=64"
