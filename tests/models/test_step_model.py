"""The model of the encoders' time on a GPU, and the table that docs/step.md prints from it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from open_clip.transformer import LayerNorm

from clipscale.models.lean import LeanNorm
from clipscale.plan.memory_tracker import cuda_autocast, without_memory
from tests.models.step_model import BANDWIDTH, MODELS, RATE, ROWS, Clock, lengths, predicted

DOCS = Path(__file__).parents[2] / "docs" / "step.md"


def test_an_operation_takes_its_products_or_its_bytes_whichever_is_more() -> None:
    def seconds(n: int, width: int) -> tuple[float, int]:
        a, b = torch.empty(n, width), torch.empty(width, n)
        with Clock() as clock:
            a.t().t() @ b  # views take nothing
        return clock.seconds, clock.launches

    with without_memory():
        assert seconds(8192, 8192) == (pytest.approx(2 * 8192**3 / RATE), 1)
        assert seconds(8192, 1) == (pytest.approx(4 * (2 * 8192 + 8192**2) / BANDWIDTH), 1)
        x = torch.empty(1 << 20)
        with Clock() as clock:
            x.add_(1)
        assert (clock.seconds, clock.launches) == (pytest.approx(2 * 4 * 2**20 / BANDWIDTH), 1), "read and written"


def test_a_lean_layer_norm_moves_a_fifth_of_the_bytes() -> None:
    """Under autocast on a GPU: one launch instead of three, without float32 copies of its input and its output."""

    def of(norm: torch.nn.Module) -> tuple[float, int]:
        with without_memory(), cuda_autocast(), torch.autocast("cpu", torch.bfloat16):
            x = torch.empty(256, 50, 768, dtype=torch.bfloat16)
            with Clock() as clock, torch.no_grad():
                y = norm(x)
        assert y.dtype == torch.bfloat16
        return clock.seconds, clock.launches

    with without_memory():
        cast, lean = of(LayerNorm(768)), of(LeanNorm(768))
    assert (cast[1], lean[1]) == (3, 1) and cast[0] / lean[0] == pytest.approx((6 + 8 + 6) / 4, rel=0.01)


def test_captions_are_as_long_as_stated() -> None:
    found = lengths()
    assert found.mean() == pytest.approx(20, abs=0.5) and np.percentile(found, 99) == pytest.approx(64, abs=3)
    assert 0.001 < (found == 77).mean() < 0.01


@pytest.mark.slow  # a minute a model
@pytest.mark.parametrize("name", MODELS)
def test_the_table_in_the_docs_is_the_models(name: str) -> None:
    (line,) = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| {name} |")]
    printed = [float(cell) for cell in line.split("|")[3:-1]]
    found = predicted(name)
    assert printed == pytest.approx([found[row] for row in reversed(ROWS)], abs=0.02)
    neither, unlean, unsorted, cast, cache = printed
    assert cache < min(unlean, unsorted, cast) and max(unlean, unsorted, cast) < neither, "every row helps"
