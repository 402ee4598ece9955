"""Measures a captioner on pictures with captions: how well it predicts these, and captions that it writes itself.

n: pairs of a batch, T: tokens of the captions, P: tokens of an image, W: width of the decoder.
"""

import io
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from clipscale.common.record import Metrics, WrittenCaption
from clipscale.eval.encode import EvalEncoder, gather_batches
from clipscale.models.captioner import PAD, WRITTEN_TOKENS, caption_losses, write_captions

# Pairs with logits in memory at once. With 76 tokens and CLIP's vocabulary they take half a GB.
PAIRS_AT_ONCE = 32
# A report shows this many of a set's first usable pictures.
MAX_SHOWN = 8


class ShownPicture(NamedTuple):
    """A picture that a report may show."""

    # Its index in the set.
    number: int
    pixels: Tensor
    # Its tokens (P, W).
    tokens: Tensor


@dataclass
class CaptionMeter:
    """Collects a captioner's losses on a set's pictures, each with its first caption, while they are encoded."""

    encoder: EvalEncoder
    # The captions of each picture.
    captions: Sequence[Sequence[str]]
    # For each batch of this rank (n, 2): a caption's sum of cross entropies, and its number of tokens.
    batches: list[Tensor] = field(default_factory=list)
    # The first usable pictures of this rank.
    shown: list[ShownPicture] = field(default_factory=list)
    # Tokens (1, P, W) of any picture. A rank that has no picture to show uses them instead.
    fallback_tokens: Tensor | None = None

    @torch.no_grad()
    def add(self, span: range, usable: Tensor, pixels: Tensor, image_nPW: Tensor) -> None:
        """Add a batch: its pictures' indices, whether each is usable, the pictures, and their tokens.

        A rank without work passes an empty `span`.
        """
        texts = [*(self.first(index) for index in span), *([] if span else [""])]
        tokens_nT = self.encoder.model.tokenizer(texts).to(pixels.device)
        losses = []
        # All ranks make equally many passes: one without work repeats a pair.
        for start in range(0, min(self.encoder.batch_size, len(self.captions)), PAIRS_AT_ONCE):
            pairs = slice(start, start + PAIRS_AT_ONCE) if start < len(texts) else slice(1)
            losses.append(self.losses(image_nPW[pairs], tokens_nT[pairs]))
        self.batches.append(torch.cat(losses)[: len(span)])
        self.fallback_tokens = image_nPW[:1]
        for row in usable.nonzero()[: MAX_SHOWN - len(self.shown), 0].tolist():
            self.shown.append(ShownPicture(span[row], pixels[row].cpu(), image_nPW[row].clone()))

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

    @torch.no_grad()
    def write(self, usable_N: Tensor) -> list[WrittenCaption]:
        """Let the captioner write captions of the first pictures of all ranks, in order.

        Every rank writes, because all of them gather sharded weights. `usable_N`: indices of the pictures that count.
        """
        model = self.encoder.model
        first = set(usable_N[:MAX_SHOWN].tolist())
        own = [picture for picture in self.shown if picture.number in first]
        assert self.fallback_tokens is not None
        image_nPW = torch.stack([picture.tokens for picture in own]) if own else self.fallback_tokens
        with self.encoder.autocast():
            length = min(WRITTEN_TOKENS, model.context_length)
            tokens_nT = write_captions(model.text, self.decoder, image_nPW, model.tokenizer.bos_eos_ids, length)
        rows: dict[int, WrittenCaption] = {}
        for (number, pixels, _), tokens in zip(own, tokens_nT.tolist()):
            caption = model.tokenizer.text(tokens)
            rows[number] = {"picture": jpeg(pixels), "caption": self.first(number), "written": caption}
        of_ranks = self.encoder.world.all_gather_object(rows)
        return [row for _, row in sorted((item for rows in of_ranks for item in rows.items()), key=itemgetter(0))]

    def metrics(self, usable_N: Tensor) -> Metrics:
        """`caption_loss`, the mean cross entropy of a token in nats, and its exponential `perplexity`, on every rank.

        `usable_N`: indices of the pictures that count.
        """
        rows = gather_batches(self.batches, len(self.captions), self.encoder.batch_size, self.encoder.world)
        loss, tokens = rows[usable_N].sum(0).tolist()
        mean = loss / tokens if tokens else math.nan
        return {"caption_loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def jpeg(pixels: Tensor) -> str:
    """uint8 pixels (3, H, W) as a JPEG, in base64."""
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=85)
    return b64encode(file.getvalue()).decode()
