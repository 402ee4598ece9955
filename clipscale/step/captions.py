"""Whether a run sorts its captions and cuts their padding, by a trial at its start; the text tower's inputs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale.config.train import TrainConfig
from clipscale.data.loader.captions import SortedCaptions, widths_of
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.shard_stream import lengths
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import World
from clipscale.loss.machine import float32_matmuls
from clipscale.models.towers import ClipModel

WORDS = (0, 1, 4, 12, 30)
"""Words of the captions that are tried."""
TOLERANCE = 1e-4
"""Largest difference of two unit features that counts as rounding, in float32."""


class CaptionRule:
    """A run sorts its captions if the text tower's features do not depend on padding. A collective."""

    def __init__(self, config: TrainConfig, world: World, model: ClipModel, *, sort: bool = True) -> None:
        self.world, self.resident, self.context = world, config.offload == "none", model.context_length
        self.pad: int | None = None
        """The padding token; None: captions keep their order and the whole context."""
        self.note = ""
        """Why captions are not sorted, if they should be."""
        if not sort:
            return
        pad = world.on_main(lambda: padding(model.text, model.tokenizer, world.device))
        if isinstance(pad, int):
            self.pad = pad
        else:
            self.note = f"captions keep their order and the whole context: {pad}"

    def input(self, batch: HostBatch) -> ChunkLoader | SortedCaptions:
        """The text tower's input; sorted if this run sorts."""
        device = self.world.device
        count = batch.texts
        if self.pad is None:
            return ChunkLoader(batch.tokens, count, device, resident=self.resident)
        return SortedCaptions(batch.tokens, batch.lengths, count, device, resident=self.resident)

    def widths(self, texts: ChunkLoader | SortedCaptions) -> dict[int, int]:
        """Captions of a step that has run, by the width at which the tower computed them."""
        return texts.widths() if isinstance(texts, SortedCaptions) else {self.context: len(texts)}


def padding(tower: nn.Module, tokenizer: Callable[[list[str]], Tensor], device: torch.device) -> int | str:
    """The padding token, if a float32 tower's unit features stay the same without padding; else why it may not be cut.

    `tower` maps tokens (N, T) to features (N, D). A tower that normalises over a batch's samples is not cut either.
    """
    if any(isinstance(module, _BatchNorm) for module in tower.modules()):
        return "the text tower has batch normalisation"
    tokens = tokenizer([" ".join(["cat"] * count) for count in WORDS])
    pad = int(tokens[0, -1])
    widths = widths_of(lengths(tokens.numpy(), pad), tokens.shape[1])
    training = tower.training
    tower.eval()
    try:
        with torch.no_grad(), float32_matmuls("ieee"):
            whole = tower(tokens.to(device))
            for row, (caption, width) in enumerate(zip(tokens, widths.tolist())):
                try:
                    cut = tower(caption[None, :width].to(device))
                except (RuntimeError, ValueError, IndexError):
                    return "the text tower takes only whole contexts"
                if cut.shape != whole[row, None].shape or not (cut - whole[row, None]).abs().max() <= TOLERANCE:
                    return "the text tower's features depend on padding"
    finally:
        tower.train(training)
    return pad
