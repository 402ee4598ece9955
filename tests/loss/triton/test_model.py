"""The static model of the kernels' speed: no change may make it worse than model.json says, and the code stays as short as promised."""

import json
import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

import triton

from tests.loss.triton.binaries import entry
from tests.loss.triton.model import MODELLED, RECORD, WIDTHS, code_of, shares

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))
USUAL = [(90, "lse"), (90, "softmax gradient")]
CURRENT = pytest.mark.skipif(triton.__version__ < "3.9", reason="model.json is of Triton 3.9")


def check(capability: int, name: str) -> None:
    for width, found, recorded in zip(
        WIDTHS, shares(capability, name), RECORDED[f"sm_{capability} {name}"], strict=True
    ):
        assert found >= recorded - 0.005, f"D = {width}: {found:.1%} of the GEMM rate instead of {recorded:.1%}"


@CURRENT
@pytest.mark.parametrize(("capability", "name"), USUAL)
def test_no_change_makes_the_model_worse(capability: int, name: str) -> None:
    check(capability, name)


@CURRENT
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name"), [case for case in MODELLED if case not in USUAL])
def test_nor_for_the_other_kernels_and_architectures(capability: int, name: str) -> None:
    check(capability, name)


def test_the_record_has_every_kernel_and_no_other() -> None:
    assert set(RECORDED) == {f"sm_{capability} {name}" for capability, name in MODELLED}


def test_the_forward_epilogue_takes_under_350_instructions_a_warp_for_128_x_128_scores() -> None:
    binary = entry(90, "bf16", "lse")
    count = code_of(binary.cubin, walks=True).epilogue.total() * 128 * 128 / (binary.tiles.rows * binary.tiles.cols)
    assert count < 350, f"{count:.0f} instructions"


def test_the_gradient_epilogue_takes_under_8_instructions_an_element() -> None:
    binary = entry(90, "bf16", "softmax gradient")
    count = code_of(binary.cubin, walks=False).epilogue.total()
    elements = binary.tiles.rows * binary.tiles.cols / (32 * binary.tiles.warps)
    assert count / elements < 8, f"{count} instructions for {elements:.0f} elements of a thread"
