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
    """A GPU on which the candidates take these seconds, in their order."""

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
        return self.times.pop(0)


class Broken(Timed):
    def seconds(self, work: Callable[[], None], device: torch.device) -> float:
        self.asked += 1
        raise torch.OutOfMemoryError("CUDA out of memory")


def inputs(n: int = 32, width: int = 64, keys: torch.Tensor | None = None) -> Inputs:
    u, v = torch.ones(n, width), torch.ones(40, width)
    return checked_inputs(Arguments(u, v[:n], 10.0, keys=keys), captions=1, has_module=False, check=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty, and a process that has chosen nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trial, "SIDE", 32)
    monkeypatch.setattr(trial, "_chosen", {})
    return tmp_path / "clipscale/tiles"


def test_the_fastest_is_chosen_once_a_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Timed(0.009, 0.008, 0.007, 0.003, 0.002, 0.004)
    for _ in range(2):
        assert trial.chosen_tiles(SOFTMAX, inputs(), first) == CANDIDATES[4]
    assert first.asked == len(CANDIDATES), "the second call of a process knows"
    monkeypatch.setattr(trial, "_chosen", {})
    later = Timed()
    assert trial.chosen_tiles(SOFTMAX, inputs(), later) == CANDIDATES[4]
    assert later.asked == 0, "so does the next process"
    for objective, other in ((SOFTMAX, inputs(width=128)), (OBJECTIVES["sigmoid"], inputs())):
        machine = Timed(*[0.001] * 6)
        trial.chosen_tiles(objective, other, machine)
        assert machine.asked == 6, "another width or objective has a trial of its own"
    assert len(list(cache.iterdir())) == 3


def test_a_little_faster_is_not_enough() -> None:
    assert (
        trial.chosen_tiles(SOFTMAX, inputs(), Timed(*[0.01, 0.0099, 0.0099, 0.0099, 0.0099, 0.0099])) == CANDIDATES[0]
    )


def test_a_slow_gpu_is_not_held_up() -> None:
    slow = Timed(0.5, 0.4, 0.3, 0.2, 0.1, 0.1)
    assert trial.chosen_tiles(SOFTMAX, inputs(), slow) == CANDIDATES[1]
    assert slow.asked == 2, "three times 0.9 s have passed"


def test_after_a_failure_all_is_as_without_a_trial(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken()
    for _ in range(2):
        assert trial.chosen_tiles(SOFTMAX, inputs(), broken) == CANDIDATES[0]
    assert broken.asked == 1, "a process tries once"
    assert not cache.exists(), "the next one may succeed"
    monkeypatch.setattr(trial, "_chosen", {})
    cache.parent.mkdir()
    cache.write_text("no folder")
    assert trial.chosen_tiles(SOFTMAX, inputs(), Timed(*[0.02, 0.01] * 3)) == CANDIDATES[0]


@pytest.mark.parametrize("kept", ["", "[]", '{"chosen": {"rows": 1}}', '{"chosen": 3}'])
def test_a_record_that_is_no_candidate_is_made_anew(kept: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.chosen_tiles(SOFTMAX, inputs(), Timed(*[0.02, 0.01] * 3))
    (path,) = cache.iterdir()
    path.write_text(kept)
    monkeypatch.setattr(trial, "_chosen", {})
    assert trial.chosen_tiles(SOFTMAX, inputs(), Timed(*[0.03, 0.02, 0.01] * 2)) == CANDIDATES[2]


def test_no_trial_for_small_blocks_keys_evaluation_or_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Timed()
    assert trial.chosen_tiles(SOFTMAX, inputs(n=31), machine) is None
    assert trial.chosen_tiles(SOFTMAX, inputs(keys=torch.arange(32)), machine) is None
    with torch.no_grad():
        assert trial.chosen_tiles(SOFTMAX, inputs(), machine) is None
    monkeypatch.setenv("CLIPSCALE_LOSS_TRIAL", "0")
    assert trial.chosen_tiles(SOFTMAX, inputs(), machine) is None
    assert machine.asked == 0
