"""The choice of tiles by a trial, on a machine whose times are made up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clipscale.loss.inputs import Arguments, Inputs, checked_inputs
from clipscale.loss.machine import Machine
from clipscale.loss.objectives import OBJECTIVES
from clipscale.loss.triton import trial
from clipscale.loss.triton.tuning import Tiles, candidates_for

CANDIDATES = candidates_for(90, torch.bfloat16)
SOFTMAX = OBJECTIVES["softmax"]


class Timed(Machine):
    """A GPU on which the candidates take these seconds, in their order; none are left: it runs out of memory."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.times = list(seconds)
        self.asked = 0

    def name(self, device: torch.device) -> str:
        return "NVIDIA H100 80GB/HBM3"

    def candidates(self, device: torch.device, dtype: torch.dtype) -> tuple[Tiles, ...]:
        return CANDIDATES

    def seconds(self, work: Callable[[], None], device: torch.device) -> float:
        self.asked += 1
        if not self.times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.times.pop(0)


def inputs(n: int = 32, width: int = 64) -> Inputs:
    u, v = torch.ones(n, width), torch.ones(40, width)
    return checked_inputs(Arguments(u, v[:n], 10.0), captions=1, has_module=False, check=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are kept, empty, of a process that has chosen nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trial, "SIDE", 32)
    monkeypatch.setattr(trial, "_chosen", {})
    return tmp_path / "clipscale/tiles"


def test_the_fastest_is_chosen_once_a_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Timed(0.009, 0.008, 0.007, 0.003, 0.002, 0.004)
    for _ in range(2):
        assert trial.chosen_tiles(SOFTMAX, inputs(), machine) == CANDIDATES[4]
        monkeypatch.setattr(trial, "_chosen", {})  # as in the next process
    assert machine.asked == len(CANDIDATES)
    for objective, width in ((SOFTMAX, 128), (OBJECTIVES["sigmoid"], 64)):
        assert trial.chosen_tiles(objective, inputs(width=width), Timed(*[0.02, 0.01] * 3)) == CANDIDATES[1]
    assert len(list(cache.iterdir())) == 3, "another width or objective has a trial of its own"
    for path in cache.iterdir():
        path.write_text("Tiles(rows=1)")
    monkeypatch.setattr(trial, "_chosen", {})
    assert trial.chosen_tiles(SOFTMAX, inputs(), Timed(*[0.01] * 6)) == CANDIDATES[0], "what is kept is no candidate"


@pytest.mark.parametrize(
    ("seconds", "chosen", "asked"),
    [
        ((0.01, 0.0099, 0.0099, 0.0099, 0.0099, 0.0099), 0, 6),  # a little faster is not enough
        ((0.2, 0.15, 0.1, 0.05, 0.05, 0.05), 1, 2),  # eight times 0.35 s have passed
        ((0.02, 0.01), 0, 3),  # it fails
    ],
)
def test_a_slow_gpu_is_not_held_up_and_a_failure_leaves_all_as_it_was(
    seconds: tuple[float, ...], chosen: int, asked: int, cache: Path
) -> None:
    machine = Timed(*seconds)
    for _ in range(2):
        assert trial.chosen_tiles(SOFTMAX, inputs(), machine) == CANDIDATES[chosen]
    assert machine.asked == asked, "a process tries once"
    assert cache.exists() == (asked != 3), "after a failure the next process may try again"


def test_without_a_folder_to_keep_it_there_is_no_choice(cache: Path) -> None:
    cache.parent.write_text("no folder")
    assert trial.chosen_tiles(SOFTMAX, inputs(), Timed(*[0.02, 0.01] * 3)) == CANDIDATES[0]


def test_no_trial_for_small_blocks_evaluation_or_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Timed()
    assert trial.chosen_tiles(SOFTMAX, inputs(n=31), machine) == CANDIDATES[0]
    with torch.no_grad():
        assert trial.chosen_tiles(SOFTMAX, inputs(), machine) == CANDIDATES[0]
    monkeypatch.setenv("CLIPSCALE_LOSS_TRIAL", "0")
    assert trial.chosen_tiles(SOFTMAX, inputs(), machine) == CANDIDATES[0]
    assert machine.asked == 0
