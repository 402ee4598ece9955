"""A step asks the device for values where its loss and gradient norm are read, and for the scale of its loss."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import clipscale
from clipscale.config.model import ModelConfig
from clipscale.config.sections import LossConfig
from clipscale.run.train_loop import TrainLoop
from clipscale.step.train_step import StepResult
from clipscale.train import train
from tests.support.runs import ARCHITECTURE, four_step_config

PACKAGE = str(Path(clipscale.__file__).parent)
# Operations for whose result the host would wait on a GPU.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"}
# What a GPU does otherwise.
ON_A_CPU = {
    "train_step.py:update",  # torch's AdamW counts its steps in tensors, which the fused one leaves on the GPU
    "similarity.py:bound",  # torch's tiles of the loss; on a GPU they are Triton's
    "tile.py:<genexpr>",
}
READ = {
    "measurements.py:read": 2,  # the loss and the norm; and the record of the step before, once it is there
    "world.py:values": 2,  # what the ranks agreed on, and agree on: in host memory
}


def place() -> str:
    """The innermost function of this package on the stack, as `file:function`."""
    ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}"


class CountWaits(TorchDispatchMode):
    """Where a value is asked for: our innermost function -> how often."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            self.places[place()] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("objective", "passes"), [("softmax", 2), ("sigmoid", 1)])
def test_a_step_waits_for_two_values_of_the_device(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, passes: int
) -> None:
    steps = []
    run_step = TrainLoop.run_step
    as_list = Tensor.tolist

    def counted(run: TrainLoop) -> StepResult:
        def tolist(tensor: Tensor) -> Any:
            counter.places[place()] += 1
            return as_list(tensor)

        with CountWaits() as counter, monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", tolist)
            result = run_step(run)
        steps.append(counter.places)
        return result

    monkeypatch.setattr(TrainLoop, "run_step", counted)
    model = ModelConfig(name="test", architecture=ARCHITECTURE, init_bias=-10.0 if objective == "sigmoid" else None)
    train(four_step_config(shards, tmp_path / "run", model=model, loss=LossConfig(objective=objective)))
    assert len(steps) == 4
    expected = READ | {"block.py:scale_number": passes}  # of the loss; on a GPU the softmax reads it in one
    for places in steps[2:]:  # the first ones measure graphs
        assert {name: count for name, count in places.items() if name not in ON_A_CPU} == expected
