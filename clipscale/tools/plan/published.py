"""The memory of the published implementations of a loss, by what their own code keeps (docs/plan.md, "As published").

N: batch, b: samples of one rank, D: feature width. All sizes in bytes of one GPU.
"""

import math
from functools import partial
from typing import Any
from unittest.mock import patch

from clipscale.common.errors import UserError
from clipscale.config.tools import PlanConfig
from clipscale.models.towers import build_model
from clipscale.step.chunk_sizes import sizes_of_settings
from clipscale.tools.plan import ASSUMED
from clipscale.tools.plan.dry_run import dry_run

CHUNK, CUDA = 128, 80
"""The chunk of the published measurements, where the settings leave it open; and their GPUs' compute capability."""


def method_of(config: PlanConfig) -> str:
    """The published method that the settings of `loss` name. Raises UserError for any other."""
    chosen = config.loss.objective, config.loss.exchange, config.loss.backend
    for name, method in ASSUMED.published.items():
        if chosen == ("softmax", method["exchange"], method["backend"]):
            return str(name)
    raise UserError(f"published=true: known are loss={', '.join(ASSUMED.published)}; take one of them")


class Published:
    """A step with open_clip's own forward pass, whose graph a dry run measures, and a gradient cache, under DDP and
    AdamW, as Inf-CL's code takes it. Its loss runs outside of autocast, on float32 features.
    """

    def __init__(self, config: PlanConfig) -> None:
        self.config, self.ranks = config, config.gpus * config.nodes
        local = config.batch // self.ranks
        self.chunk = sizes_of_settings(config.cache, local)["image"] or min(CHUNK, local)
        plain = patch("clipscale.tools.plan.dry_run.build_model", partial(build_model, lean=False))
        with plain, dry_run(config, 1, CUDA) as run:
            self.width, self.sample = run.width, 4 * math.prod(run.row) + 8 * run.context_length
            self.weights = sum(p.nbytes for p in run.state.model.parameters())
            self.trained = sum(p.nbytes for p in run.state.trained)
            self.graph = run.graph(0, self.chunk) + run.graph(1, self.chunk)  # both towers at once, as in CLIP.forward

    def facts(self, name: str, batch: int, memory: int) -> dict[str, Any]:
        """Of a method at a batch: the peak of the loss and its backward pass, beyond the chunks' features; the memory
        in use at the step's peak, as the driver counts it; and whether a GPU with so much memory holds it.
        """
        method, local = ASSUMED.published[name], batch // self.ranks
        scores = method["matrices"] * batch * (batch if method["all_rows"] else local)
        loss = int(4 * (scores + self.width * (method["gathered"] * batch + method["local"] * local)))
        features = 2 * 4 * self.width * local
        offloaded = method["offload"] and self.config.offload != "none"
        inputs = self.sample * (min(self.chunk, local) if offloaded else local)
        # Weights, AdamW's two moments and, with several ranks, DDP's buckets. Gradients are separate from the buckets.
        start = self.weights + self.trained * (3 if self.ranks > 1 else 2) + inputs + outside_torch(self.ranks)
        if self.chunk >= local:  # without a cache the loss is on top of the graph
            peak = start + self.graph + max(loss, self.trained)
        else:
            peak = start + features + max(loss, self.trained + self.graph + features)  # features, and their gradients
        return {"loss_bytes": loss, "peak_bytes": peak, "fits": peak <= memory}


def outside_torch(ranks: int) -> int:
    """Memory of a GPU that torch's allocator does not count."""
    return int(ASSUMED.context + (ASSUMED.nccl if ranks > 1 else 0))
