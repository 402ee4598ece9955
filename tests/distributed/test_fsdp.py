"""What FSDP2 sends and holds within a step, by stage and type."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.measure import GATHER, SUM, measured, small_model
from tests.support.ranks import run_ranks

CHUNKS, LAYERS = 3, 2
GROUPS = 2 * (LAYERS + 1)
"""Both towers' blocks, and what is outside of them."""
CASES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in (0, 1, 2, 3)),
    {"stage": 1, "half": "bfloat16", "steps": 2},
    {"stage": 3, "half": "bfloat16"},
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The first rank's results of all cases."""
    return run_ranks(measured, 2, [{**case, "chunks": CHUNKS, "layers": LAYERS} for case in CASES])[0]


def of(found: list[dict[str, Any]], **case: Any) -> dict[str, Any]:
    return found[CASES.index(case)]


def test_weights_are_gathered_once_in_a_step_and_gradients_summed_once(found: list[dict[str, Any]]) -> None:
    """Stage 0 is FSDP2 by itself: it gathers three times for each chunk."""
    before = of(found, stage=0)
    assert (before[GATHER], before[SUM]) == (3 * 2 * LAYERS * CHUNKS + 2 * CHUNKS, GROUPS)
    for stage, sums in ((1, GROUPS), (2, CHUNKS * GROUPS)):
        now = of(found, stage=stage)
        assert (now[GATHER], now[SUM]) == (GROUPS, sums), f"stage {stage}"
        assert now[f"{GATHER} bytes"] < before[f"{GATHER} bytes"] / (2 * CHUNKS)
    assert of(found, stage=3)[GATHER] == before[GATHER]


def test_each_stage_holds_what_it_says(found: list[dict[str, Any]]) -> None:
    model = small_model(LAYERS)
    largest = max(sum(p.nbytes for p in tower.parameters()) for tower in (model.image, model.text))
    held = {
        stage: (of(found, stage=stage)["whole weights"], of(found, stage=stage)["whole gradients"])
        for stage in (0, 1, 2, 3)
    }
    assert held == {0: (0, largest), 1: (largest, largest), 2: (largest, 0), 3: (0, 0)}


def test_bf16_weights_are_gathered_in_bf16_with_the_features_and_gradients_of_autocast(
    found: list[dict[str, Any]],
) -> None:
    """Bit-equal features, since autocast rounds the same weights; gradients to the rounding of bf16."""
    first, third = of(found, stage=1, half="bfloat16", steps=2), of(found, stage=3, half="bfloat16")
    for stage, now in ((1, first), (3, third)):
        assert now["same features"]
        assert now[f"{GATHER} bytes"] < 0.6 * of(found, stage=stage)[f"{GATHER} bytes"]
        assert all(g.dtype == torch.float32 for g in now["gradients"].values())
    assert worst(third["gradients"], first["gradients"]) < 1e-5


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(((found[name] - g).norm() / g.norm()).item() for name, g in wanted.items())
