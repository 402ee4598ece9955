"""Each check has one message."""

from pathlib import Path

import pytest

from clipscale.common.errors import UserError
from clipscale.config.checks import check_value, choice, existing_run, shared
from clipscale.config.setting import Setting


def test_a_run_must_exist_and_a_sweep_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^run={tmp_path}/none: there is no folder {tmp_path}/none$"):
        existing_run(f"{tmp_path}/none")
    for job in ("batch=64", "batch=128"):
        (tmp_path / "sizes" / job).mkdir(parents=True)
        (tmp_path / "sizes" / job / "config.yaml").write_text("")
    with pytest.raises(
        UserError, match=rf"^run={tmp_path}/sizes: a sweep of 2 runs; .* run={tmp_path}/sizes/batch=128$"
    ):
        existing_run(f"{tmp_path}/sizes")
    assert existing_run(f"{tmp_path}/sizes/batch=64") == tmp_path / "sizes/batch=64"


def test_the_messages_name_setting_value_and_remedy() -> None:
    with pytest.raises(UserError, match=r"^device=cdua: choose cpu or cuda; did you mean 'cuda'\?$"):
        choice("device", "cdua", ("cpu", "cuda"))
    number = Setting("x", float | None, None, "", least=1, below=2)
    for value, wanted in ((float("nan"), "at least 1"), (0, "at least 1"), (2, "less than 2")):
        with pytest.raises(UserError, match=rf"^x={value}: give {wanted}$"):
            check_value(number, value)
    with pytest.raises(UserError, match=r"^batch=10 cannot be shared evenly by 4 processes; choose a multiple of 4$"):
        shared(10, 4, "4 processes")
    choice("device", "cpu", ("cpu", "cuda"))
    check_value(number, None)
    shared(8, 4, "4 processes")
