"""The oracle: the loss of a whole batch in one graph, written straight from the formulas. Every test compares with it.

It shares no code with the blocks, tiles and exchanges. It holds several N x M matrices.

Letters: N images, M texts, D feature width, T tokens of an image, S of a text.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dense_contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float = 0.0,
    objective: str = "softmax",
    similarity: str | nn.Module = "dot",
    keys: tuple[Tensor, Tensor] | None = None,
    shared: str = "mask",
    captions: int = 1,
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """`contrastive_loss` of all ranks' batch, in the inputs' precision: text j belongs to image j // captions, and
    texts beyond those are hard negatives."""
    n, m = len(image_features), len(text_features)
    to_text, to_image = dense_similarities(image_features, text_features, similarity, *masks)
    owner = torch.arange(m, device=image_features.device) // captions
    positive = owner[None, :] == torch.arange(n, device=image_features.device)[:, None]
    equal = torch.zeros_like(positive)
    if keys is not None and shared != "ignore":
        equal = keys[0][:, None] == keys[1][None, :]
    left_out = equal & ~positive if shared == "mask" else torch.zeros_like(positive)
    positive = positive | equal if shared == "positive" else positive

    if objective == "sigmoid":
        logits = logit_scale * (to_text + to_image) / 2 + logit_bias
        terms = F.binary_cross_entropy_with_logits(logits, positive.to(logits.dtype), reduction="none")
        return terms.masked_fill(left_out, 0).sum() / n
    rows, cols = ((logit_scale * x).masked_fill(left_out, -torch.inf) for x in (to_text, to_image))
    image_loss = one_sided(rows, positive)
    text_loss = one_sided(cols.T[: captions * n], positive.T[: captions * n])
    return {"softmax": (image_loss + text_loss) / 2, "softmax_image": image_loss, "softmax_text": text_loss}[objective]


def dense_distillation_loss(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, teachers: Sequence[tuple[Tensor, Tensor, float]]
) -> Tensor:
    """`distillation_loss` of all ranks' batch, with weights 0 and 1."""
    scores, value = logit_scale * image_features @ text_features.T, torch.zeros_like(logit_scale)
    for dim in (0, 1):
        wanted = torch.stack([(t * a @ b.T).softmax(dim) for a, b, t in teachers]).mean(0)
        value = value - (wanted * scores.log_softmax(dim)).sum(dim).mean() / 2
    return value


def one_sided(scores: Tensor, positive: Tensor) -> Tensor:
    """The mean over rows of the log-sum-exp less the mean of the positives' scores (SupCon, arXiv 2004.11362, eq. 2).

    scores and positive (bool): (N, M)."""
    positives = scores.masked_fill(~positive, 0).sum(1) / positive.sum(1)
    return (scores.logsumexp(1) - positives).mean()


def dense_similarities(
    image_features: Tensor,
    text_features: Tensor,
    similarity: str | nn.Module,
    image_mask: Tensor | None,
    text_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The similarities (N, M) from image to text and from text to image."""
    if isinstance(similarity, nn.Module):
        scores = similarity(image_features, text_features)
        return scores, scores
    if similarity == "dot":
        scores = image_features @ text_features.T
        return scores, scores
    if image_mask is None:
        image_mask = torch.ones(image_features.shape[:2], dtype=torch.bool, device=image_features.device)
    if text_mask is None:
        text_mask = torch.ones(text_features.shape[:2], dtype=torch.bool, device=text_features.device)
    tokens = torch.einsum("itd,jsd->ijts", image_features, text_features)
    text_best = tokens.masked_fill(~text_mask[None, :, None, :], -torch.inf).amax(3)  # (N, M, T)
    image_best = tokens.masked_fill(~image_mask[:, None, :, None], -torch.inf).amax(2)  # (N, M, S)
    to_text = (text_best * image_mask[:, None, :]).sum(2) / image_mask.sum(1)[:, None]
    to_image = (image_best * text_mask[None, :, :]).sum(2) / text_mask.sum(1)[None, :]
    return to_text, to_image
