"""An exponential moving average of the trained weights, which often evaluates better than the last ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from clipscale.checkpoint.state import EmaState
from clipscale.distributed.fsdp import local_shard, reshard


class WeightEma:
    """a <- d a + (1 - d) w after every step, in float32, with d = min(decay, (1 + n) / (10 + n)) in step n = 1, 2, ...

    The smaller decay of the first steps lets the average forget the initial weights, as in TensorFlow's
    ExponentialMovingAverage.
    """

    def __init__(self, decay: float, model: nn.Module) -> None:
        """The average starts at the model's trained parameters. Sharded parameters have sharded averages."""
        self.decay = decay
        self.num_updates = 0
        self.model = model
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = self._copy()

    def update(self) -> None:
        """Average in the weights of this step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        values = [local_shard(value) for value in self.averages.values()]
        weights = [local_shard(w.detach()) for w in self.weights.values()]
        get_ema_multi_avg_fn(decay)(values, weights, self.num_updates)

    def state_dict(self) -> EmaState:
        """The state for a checkpoint."""
        return {"updates": self.num_updates, "weights": dict(self.averages)}

    def load(self, state: EmaState | None) -> None:
        """Continue a checkpoint's average; with None start again at the current weights."""
        self.num_updates = state["updates"] if state else 0
        for name, value in self.averages.items():
            local_shard(value).copy_(local_shard(state["weights"][name] if state else self.weights[name].detach()))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In this context, the model has the averaged weights. Needs memory for one more copy of the weights."""
        before = self._copy()
        self._set(self.averages)
        try:
            yield
        finally:
            self._set(before)

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.weights.items()}

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self.weights.items():
            local_shard(p.detach()).copy_(local_shard(values[name]))
        reshard(self.model)  # gathered weights are outdated now
