"""The memory that the published implementations of a loss take, by what their own code keeps (docs/plan.md, "As published").

N: batch, b: samples of one rank, c: samples of a chunk, D: feature width. All sizes in bytes of one GPU.
"""

from dataclasses import dataclass

import torch

from clipscale.common.errors import UserError
from clipscale.config.tools import PlanConfig
from clipscale.models.towers import adapt, architecture, encoders_of
from clipscale.plan.memory import outside_torch
from clipscale.plan.memory_tracker import cuda_autocast, without_memory
from clipscale.step.chunk_sizes import sizes_of_settings

CHUNK = 128
"""Where the settings leave the chunk open: that of the published measurements."""


@dataclass(frozen=True)
class Method:
    """What a loss keeps at its peak, in float32: its code runs outside of autocast, on float32 features."""

    loss: dict[str, str]
    """The settings of `loss` that name it."""
    matrices: int
    """Matrices of scores, of all N rows or of the rank's b, with N columns."""
    gathered: int
    """Copies of all features of one tower (N, D)."""
    local: int
    """Copies of the rank's features of one tower (b, D)."""
    all_rows: bool = False
    offload: bool = False
    """Whether its code can keep the pixels in host memory."""

    def loss_bytes(self, batch: int, ranks: int, width: int) -> int:
        """The peak of the loss and its backward pass, beyond the features of the chunks."""
        local = batch // ranks
        scores = self.matrices * batch * (batch if self.all_rows else local)
        return 4 * (scores + width * (self.gathered * batch + self.local * local))


METHODS = {
    "clip": Method({"exchange": "replicated", "backend": "dense"}, 4, 3, 2, all_rows=True),
    "openclip": Method({"exchange": "local", "backend": "dense"}, 4, 2, 4),
    "disco": Method({"exchange": "gather", "backend": "dense"}, 4, 2, 4),
    "infcl": Method({"exchange": "auto", "backend": "auto"}, 0, 0, 16, offload=True),
}


def method_of(config: PlanConfig) -> str:
    """The published method that the settings of `loss` name. Raises UserError for any other."""
    chosen = {"exchange": config.loss.exchange, "backend": config.loss.backend}
    found = [name for name, method in METHODS.items() if method.loss == chosen]
    if config.loss.objective != "softmax" or not found:
        raise UserError(f"published=true: only loss={', '.join(METHODS)} are known as published; take one of them")
    return found[0]


class Published:
    """A training step with open_clip's own model and a gradient cache, under DDP and AdamW, as Inf-CL's code takes it."""

    def __init__(self, config: PlanConfig) -> None:
        self.config, self.ranks = config, config.gpus * config.nodes
        local = config.batch // self.ranks
        self.chunk = sizes_of_settings(config.cache, local)["image"] or min(CHUNK, local)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(config.precision.name)
        with without_memory() as tracker, cuda_autocast():
            description = architecture(config.model)
            model = encoders_of(description).train()
            adapt(model, config.model, description)
            model.visual.requires_grad_(not config.model.freeze_image)
            model.text.requires_grad_(not config.model.freeze_text)
            model.set_grad_checkpointing(config.model.grad_checkpointing)
            side = model.visual.image_size
            side = side[0] if isinstance(side, tuple) else side
            self.width, self.weights = description["embed_dim"], tracker.live
            self.trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            images = torch.empty(self.chunk, 3, side, side)
            tokens = torch.empty(self.chunk, model.context_length, dtype=torch.int64)
            self.sample = (images.nbytes + tokens.nbytes) // self.chunk
            for p in model.parameters():
                p.grad = torch.empty_like(p) if p.requires_grad else None
            tracker.take_peak()
            before = tracker.live
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):  # both towers, as in CLIP.forward
                features = model.encode_image(images, normalize=True), model.encode_text(tokens, normalize=True)
            torch.stack([rows.float().sum() for rows in features]).sum().backward()
            self.graph = tracker.take_peak() - before

    def loss(self, name: str, batch: int) -> int:
        """The loss of a method at a batch."""
        return METHODS[name].loss_bytes(batch, self.ranks, self.width)

    def peak(self, name: str, batch: int) -> int:
        """Memory of the device in use at its peak, as the driver counts it."""
        local, features = batch // self.ranks, 8 * self.width * batch // self.ranks
        offloaded = METHODS[name].offload and self.config.offload != "none"
        inputs = self.sample * (min(self.chunk, local) if offloaded else local)
        # Weights, AdamW's two moments and, with several ranks, DDP's buckets; gradients beside the buckets from the first
        # chunk's backward pass to the update.
        start = self.weights + self.trained * (3 if self.ranks > 1 else 2) + inputs
        graph, loss = self.trained + self.graph, features + self.loss(name, batch)
        # Without a cache the loss is on top of the graph; with one, features and their gradients are beside a chunk's.
        step = graph - self.trained + loss if self.chunk >= local else max(loss, graph + 2 * features)
        return start + max(step, graph) + outside_torch(self.ranks)

    def facts(self, name: str, batch: int, memory: int) -> dict[str, int | bool]:
        """Loss and peak of a method at a batch, and whether a GPU with so much memory holds it."""
        peak = self.peak(name, batch)
        return {
            "published_loss_bytes": self.loss(name, batch),
            "published_peak_bytes": peak,
            "published_fits": peak <= memory,
        }
