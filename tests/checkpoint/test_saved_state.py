"""What a checkpoint must hold is checked when it is read: no entry may be missing, and none of another type."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale import checkpoint
from clipscale.checkpoint import saved_state
from clipscale.config.sections import CheckpointConfig
from clipscale.train import train
from tests.security.damage import WRONG
from tests.support.runs import small


@pytest.fixture(scope="module")
def state(shards: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("state") / "run"
    train(small(shards, run, samples=12, checkpoint=CheckpointConfig()))
    found = checkpoint.load(checkpoint.locate(run, "latest"))
    saved_state.check(found)
    return found | {"model": {}}


REQUIRED = (
    *((key,) for key in ("step", "model_config", "samples", "batch", "loss", "optimizer", "optimizer_name", "scaler")),
    *((key,) for key in ("random", "position")),
    *(("optimizer", key) for key in ("state", "param_groups")),
    *(("position", key) for key in ("order", "streams", "at")),
    ("random", 0, "cpu"),
    ("optimizer", "param_groups", 0, "params"),
)


def parent(state: dict[str, Any], path: tuple[Any, ...]) -> Any:
    node: Any = state
    for key in path[:-1]:
        node = node[key]
    return node


@pytest.mark.parametrize("path", REQUIRED, ids=lambda path: ".".join(map(str, path)))
def test_no_entry_may_be_missing_or_of_another_type(state: dict[str, Any], path: tuple[Any, ...]) -> None:
    own = parent(state, path)[path[-1]]
    without = copy.deepcopy(state)
    del parent(without, path)[path[-1]]
    with pytest.raises(ValueError, match=r"\w"):
        saved_state.check(without)
    for value in (*WRONG, torch.zeros(2)):
        alike = isinstance(own, float) and type(value) is int
        if type(value) is type(own) or alike or (own is None and isinstance(value, dict)):
            continue
        other = copy.deepcopy(state)
        parent(other, path)[path[-1]] = value
        with pytest.raises(ValueError, match=r"\w") as caught:
            saved_state.check(other)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 2000, f"{value!r}"


@pytest.mark.parametrize(
    "cpu", [torch.zeros(3), torch.zeros(3, dtype=torch.uint8), torch.full_like(torch.get_rng_state(), 255)]
)
def test_a_state_of_a_generator_is_one(state: dict[str, Any], cpu: torch.Tensor) -> None:
    other = copy.deepcopy(state)
    other["random"][0]["cpu"] = cpu
    with pytest.raises(ValueError, match="no state of torch's generators"):
        saved_state.check(other)


def test_every_stream_has_its_place(state: dict[str, Any]) -> None:
    other = copy.deepcopy(state)
    other["position"]["lanes"] = other["position"].pop("streams")
    saved_state.check(other)  # as former versions wrote it
    other["position"]["at"].popitem()
    with pytest.raises(ValueError, match="not one place for each shard stream"):
        saved_state.check(other)


def test_what_evaluation_takes_is_less(state: dict[str, Any], tmp_path: Path) -> None:
    saved_state.check_model({key: state[key] for key in ("step", "model", "model_config")})
