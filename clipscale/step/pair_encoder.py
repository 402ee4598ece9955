"""A captioner as one encoder of pairs, because its caption loss needs an image and its caption together.

N: pairs, D: feature width.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from clipscale.distributed.parallel import wrap
from clipscale.distributed.world import World
from clipscale.models.captioner import Captioner
from clipscale.models.towers import ClipModel
from clipscale.step.cache.encoder_io import ChunkOutput
from clipscale.step.cache.gradient_sync import sync_context


class PairEncoder(nn.Module):
    """Both towers and the decoder as one encoder of `GradCache`.

    It takes images, as `Captioner` does, and the tokens of the same samples. It returns unit rows of images and
    captions, (N, 2, D), and with a graph the sum of the captions' cross entropies.
    """

    def __init__(self, image: nn.Module, text: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.captioner = Captioner(image, text, decoder)

    def forward(self, images: Tensor | tuple[Tensor, Tensor], tokens: Tensor) -> ChunkOutput:
        image_ND, text_ND, *losses = self.captioner(images, tokens)
        features_N2D = torch.stack([image_ND, text_ND], 1)
        return ChunkOutput(features_N2D, losses[0] if losses else None)


class ShardedPairEncoder(PairEncoder):
    """A `PairEncoder` whose towers and decoder are sharded one by one, because evaluation calls them one by one."""

    @contextmanager
    def gradient_sync(self, is_last_backward: bool) -> Iterator[None]:
        """Context of a chunk's pass, for `GradCache`: joins the contexts of both towers and of the decoder."""
        with ExitStack() as contexts:
            for module in self.captioner.children():
                contexts.enter_context(sync_context(module, is_last_backward=is_last_backward))
            yield


def pair_encoder(model: ClipModel) -> PairEncoder:
    """The encoder of a captioner's pairs on one process."""
    assert model.decoder is not None
    return PairEncoder(model.image, model.text, model.decoder)


def wrapped_pair_encoder(model: ClipModel, world: World, parallel: str, dtype: torch.dtype) -> nn.Module:
    """The encoder of a captioner's pairs under DDP or FSDP2; see `parallel.wrap`."""
    if parallel == "ddp" or world.size == 1:
        return wrap(world, pair_encoder(model), "ddp", dtype)
    assert model.decoder is not None
    return ShardedPairEncoder(
        image=wrap(world, model.image, parallel, dtype),
        text=wrap(world, model.text, parallel, dtype),
        decoder=wrap(world, model.decoder, parallel, dtype),
    )
