"""The table of GPUs by the driver's names."""

from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import hardware, hardware_of

GPUS = files.read_yaml(Path(__file__).with_name("gpus.yaml"))


@pytest.mark.parametrize(("device", "name"), GPUS.items())
def test_a_gpu_is_found_by_the_drivers_name(device: str, name: str | None) -> None:
    assert hardware_of(device) == name


def test_the_beginning_of_one_name_is_enough() -> None:
    assert hardware("rtx4090") is hardware("RTX4090-24g")
    assert hardware("l4") is hardware("l4-24g"), "not the L40S"
    for name in ("v100", "x100"):  # of two, and of none
        with pytest.raises(UserError, match=f"hardware={name}: unknown"):
            hardware(name)
