"""The model of the encoders' time on a GPU, and the table that docs/step.md prints from it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clipscale.plan.memory_tracker import without_memory
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
    neither, unlean, unsorted, cache = printed
    assert cache < min(unlean, unsorted) and max(unlean, unsorted) < neither, "every row helps"
