"""A captioner (CoCa, Yu et al. 2022, arXiv 2205.01917): beside the contrastive loss a decoder predicts the caption.

N: pairs, T: tokens of the captions, P: tokens of an image, W: width of the decoder, D: feature width, V: vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from open_clip.transformer import MultimodalTransformer
from torch import Tensor, nn

from clipscale.models.lean import LeanDecoder

# The token that fills captions up to the context. As in open_clip, the loss leaves out every label with this number.
PAD = 0
# Tokens of a written caption, with its first and last one, as in open_clip.
WRITTEN_TOKENS = 30


class Captioner(nn.Module):
    """Both towers and the decoder, over pairs of an image and its caption.

    `image` and `text` give unit rows (N, D), and with `with_tokens=True` also their tokens: (N, P, W) and (N, T, W).
    `decoder` maps both to logits of the next token: (N, P, W), (N, T, W) -> (N, T, V).
    """

    def __init__(self, image: nn.Module, text: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.image = image
        self.text = text
        self.decoder = decoder

    def forward(self, images: Tensor | tuple[Tensor, Tensor], tokens: Tensor) -> tuple[Tensor, ...]:
        """Images and integer tokens (N, T) -> unit rows (N, D) of images and of captions.

        `images`: uint8 pixels (N, 3, H, W), or what the image tower gives for them with its tokens.

        Where gradients are enabled, also the sum of the captions' cross entropies: 0-d, float32 (float64 for float64
        encoders). Without a graph the decoder does not run: the contrast does not need its loss.
        """
        image_ND, image_NPW = images if isinstance(images, tuple) else self.image(images, with_tokens=True)
        text_ND, text_NTW = self.text(tokens, with_tokens=True)
        if not torch.is_grad_enabled():
            return image_ND, text_ND
        return image_ND, text_ND, caption_losses(self.decoder, image_NPW, text_NTW, tokens).sum()


def caption_losses(decoder: nn.Module, image_NPW: Tensor, text_NTW: Tensor, tokens_NT: Tensor) -> Tensor:
    """sum_t -log p(token_{t+1} | tokens up to t, image) of each caption, (N,); pads are not labels.

    Its sum over captions, divided by their `count_caption_labels`, is open_clip's caption loss.
    """
    labels_NT = tokens_NT[:, 1:].long()
    # Choosing the labels' tokens needs their number, for which the host would wait on a GPU.
    lean = next((module for module in decoder.modules() if isinstance(module, LeanDecoder)), None)
    if tokens_NT.is_cuda or lean is None or not lean.accepts_label_mask:
        logits_NTV = decoder(image_NPW, text_NTW[:, :-1])
        losses = cross_entropies(logits_NTV.flatten(0, 1), labels_NT.flatten())
        return losses.view(labels_NT.shape).sum(1)
    is_label_NT = labels_NT != PAD
    logits_KV = decoder(image_NPW, text_NTW[:, :-1], is_label_NT)
    losses_K = cross_entropies(logits_KV, labels_NT[is_label_NT])
    return losses_K.new_zeros(is_label_NT.shape).masked_scatter(is_label_NT, losses_K).sum(1)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each label, in at least float32; 0 for a pad."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, labels, ignore_index=PAD, reduction="none")


def count_caption_labels(tokens_NT: Tensor) -> Tensor:
    """The number of labels in captions: all tokens but the first of each and the pads. 0-d int64."""
    return (tokens_NT[:, 1:] != PAD).sum()


@torch.no_grad()
def write_captions(
    text: Callable[..., tuple[Tensor, Tensor]],
    decoder: nn.Module,
    image_NPW: Tensor,
    bos_eos_ids: tuple[int, int],
    length: int,
) -> Tensor:
    """Write captions by greedy search: (N, length) int64, padded, with their first and last token.

    As open_clip's `CoCa.generate` with generation_type="top_k", top_k=1 and min_seq_len=0, which needs
    transformers 4. `bos_eos_ids`: the numbers of the first and the last token.
    """
    first, last = bos_eos_ids
    tokens_NT = torch.full((len(image_NPW), 1), first, device=image_NPW.device)
    is_done_N = torch.zeros(len(image_NPW), dtype=torch.bool, device=image_NPW.device)
    for _ in range(length - 2):
        logits_NV = decoder(image_NPW, text(tokens_NT, with_tokens=True)[1])[:, -1]
        next_N = logits_NV.argmax(-1).masked_fill(is_done_N, PAD)
        is_done_N |= (next_N == last) | (next_N == PAD)
        tokens_NT = torch.cat([tokens_NT, next_N[:, None]], dim=1)
    end_N = torch.full_like(is_done_N, last, dtype=torch.long).masked_fill(is_done_N, PAD)
    return torch.cat([tokens_NT, end_N[:, None]], dim=1)


@torch.no_grad()
def init_decoder(decoder: MultimodalTransformer) -> None:
    """Initialise a new decoder with random weights, by the formulas of its `init_parameters`.

    open_clip 3.3 never calls that method, which would fail, and leaves `text_projection` uninitialised.
    """
    width: int = decoder.width
    output = width**-0.5 * (2 * decoder.layers) ** -0.5
    for block in (*decoder.resblocks, *decoder.cross_attn):
        nn.init.normal_(block.attn.in_proj_weight, std=width**-0.5)
        nn.init.normal_(block.attn.out_proj.weight, std=output)
        nn.init.normal_(block.mlp.c_fc.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(block.mlp.c_proj.weight, std=output)
    nn.init.normal_(decoder.text_projection, std=width**-0.5)
