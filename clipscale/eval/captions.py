"""Measures a captioner on pictures with captions: how well it predicts these, and captions that it writes itself.

n: pairs of a batch, T: tokens of the captions, P: tokens of an image, W: width of the decoder.
"""

import io
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch import Tensor, nn

from clipscale.common.record import Metrics, Written
from clipscale.eval.encode import Encoder, gather_batches
from clipscale.models.captioner import PAD, WRITTEN_TOKENS, caption_losses, write_captions

# Pairs with logits in memory at once. With 76 tokens and CLIP's vocabulary they take half a GB.
PAIRS_AT_ONCE = 32
# A report shows the first pictures of a set, this many.
MAX_SHOWN = 8


@dataclass
class CaptionMeter:
    """Collects what a captioner makes of a set's pictures, each with its first caption, while they are encoded."""

    encoder: Encoder
    # The captions of each picture.
    captions: Sequence[Sequence[str]]
    # For each batch of this rank (n, 2): a caption's sum of cross entropies, and its number of tokens.
    batches: list[Tensor] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)

    @torch.no_grad()
    def add(self, span: range, pixels: Tensor, image_nPW: Tensor) -> None:
        """Add a batch: its pictures' indices, the pictures, and their tokens. A rank without work has no index."""
        texts = [*(self.first(index) for index in span), *([] if span else [""])]
        tokens_nT = self.encoder.model.tokenizer(texts).to(pixels.device)
        losses = []
        # Equally many passes on each rank: one without work repeats a pair.
        for start in range(0, min(self.encoder.batch, len(self.captions)), PAIRS_AT_ONCE):
            pairs = slice(start, start + PAIRS_AT_ONCE) if start < len(texts) else slice(1)
            losses.append(self.losses(image_nPW[pairs], tokens_nT[pairs]))
        self.batches.append(torch.cat(losses)[: len(span)])
        if len(self.batches) == 1:
            self.write(span, pixels, image_nPW)

    @property
    def decoder(self) -> nn.Module:
        decoder = self.encoder.model.decoder
        assert decoder is not None
        return decoder

    def first(self, index: int) -> str:
        return next(iter(self.captions[index]), "")

    def losses(self, image_nPW: Tensor, tokens_nT: Tensor) -> Tensor:
        """The rows of `batches`, (n, 2) float64. Columns of tokens that are all padding are left out."""
        tokens_nT = tokens_nT[:, : int((tokens_nT != PAD).any(0).nonzero().max()) + 1]
        with self.encoder.autocast():
            _, text_nTW = self.encoder.model.text(tokens_nT, with_tokens=True)
            sums_n = caption_losses(self.decoder, image_nPW, text_nTW, tokens_nT)
        return torch.stack([sums_n.double(), (tokens_nT[:, 1:] != PAD).sum(1).double()], dim=1)

    def write(self, span: range, pixels: Tensor, image_nPW: Tensor) -> None:
        """Write captions of the first pictures. Every rank does: all of them gather sharded weights."""
        model = self.encoder.model
        with self.encoder.autocast():
            length = min(WRITTEN_TOKENS, model.context_length)
            written = write_captions(model.text, self.decoder, image_nPW[:MAX_SHOWN], model.tokenizer.edges, length)
        for index, picture, tokens in zip(span, pixels.cpu(), written.tolist()):
            caption = model.tokenizer.text(tokens)
            self.written.append({"picture": jpeg(picture), "caption": self.first(index), "written": caption})

    def metrics(self, usable_N: Tensor) -> Metrics:
        """`caption_loss`, the mean cross entropy of a token in nats, and `perplexity`, exp of it. The same on every
        rank. `usable_N`: indices of the pictures that count."""
        rows = gather_batches(self.batches, len(self.captions), self.encoder.batch, self.encoder.world)
        loss, tokens = rows[usable_N].sum(0).tolist()
        mean = loss / tokens if tokens else math.nan
        return {"caption_loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def jpeg(pixels: Tensor) -> str:
    """uint8 pixels (3, H, W) as a JPEG, in base64."""
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=85)
    return b64encode(file.getvalue()).decode()
