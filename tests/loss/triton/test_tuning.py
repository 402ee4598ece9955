"""Triton compiles the chosen tiles on each architecture."""

import pytest

pytest.importorskip("triton")

from clipscale.loss.triton.tuning import FLOAT32, INTERPRETER, SHAPES, WIDTH_STEP, TileShape


@pytest.mark.parametrize("shape", sorted({*SHAPES.values(), FLOAT32, INTERPRETER}, key=str), ids=str)
def test_tiles_are_such_as_triton_compiles(shape: TileShape) -> None:
    """Sides and warps are powers of two, the features' width is whole steps, and threads find their registers."""
    for number in (shape.rows, shape.cols, shape.depth, shape.warps):
        assert number.bit_count() == 1
    assert WIDTH_STEP % shape.depth == 0
    assert shape.warps * 32 * (shape.registers or 1) <= 65536
