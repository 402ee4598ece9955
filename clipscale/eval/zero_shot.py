"""Computes zero-shot classification: class embeddings from prompts, and accuracies from similarities.

n: images, C: classes, P: prompt templates, T: tokens, D: feature width.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.eval.sets.prompts import render


def class_embeddings(
    encode_text: Callable[[Tensor], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    classnames: Sequence[str],
    templates: Sequence[str],
    *,
    batch: int = 256,
) -> Tensor:
    """Class embeddings: the normalised mean over templates of normalised prompt features (CLIP, section 3.1.4).

    encode_text: (n, T) integer tokens -> (n, D), called with exactly `batch` rows except at the end. templates: with {c} for the class.
    Returns (C, D) float32 on the device of the encoder's output, rows of length 1.
    """
    if not classnames or not templates:
        raise ValueError(f"class embeddings need classes and templates, got {len(classnames)} and {len(templates)}")
    prompts = [render(template, name) for name in classnames for template in templates]
    sums: Tensor | None = None
    for start in range(0, len(prompts), batch):
        features = F.normalize(encode_text(tokenizer(prompts[start : start + batch])).double(), dim=-1)
        if sums is None:
            sums = features.new_zeros(len(classnames), features.shape[1])
        rows = torch.arange(start, start + len(features), device=features.device) // len(templates)
        # A product with the 0/1 membership matrix adds in a fixed order on every device; index_add does not.
        first, last = start // len(templates), (start + len(features) - 1) // len(templates)
        membership = rows[None] == torch.arange(first, last + 1, device=features.device)[:, None]
        sums[first : last + 1] += membership.double() @ features
    assert sums is not None
    return F.normalize(sums, dim=-1).float()


def target_ranks(scores_nC: Tensor, target_n: Tensor) -> Tensor:
    """The number of other classes not strictly below the right one; 0 is a top-1 hit.

    Ties and NaNs count against the model, so a collapsed or diverged model scores 0 and not chance.
    scores_nC: (n, C); target_n: (n,) int64 in [0, C). Returns (n,) int64.
    """
    own = scores_nC.gather(1, target_n[:, None])
    ranks = (~(scores_nC < own)).sum(1) - 1
    return torch.where(own[:, 0].isnan(), scores_nC.shape[1], ranks)


def accuracy_counts(ranks_n: Tensor, target_n: Tensor, classes: int) -> Tensor:
    """(3, C) int64: images, top-1 hits and top-5 hits of each class. Counts of chunks and processes can be added."""
    rows = torch.stack([torch.ones_like(ranks_n), (ranks_n < 1).long(), (ranks_n < 5).long()])
    counts = torch.zeros(3, classes, dtype=torch.int64, device=ranks_n.device)
    return counts.index_add_(1, target_n, rows)


def accuracy_metrics(counts_3C: Tensor) -> dict[str, float]:
    """`top1` and `top5`, as shares of all images, and `mean_per_class_recall`, the mean top-1 of the classes with images."""
    images, top1, top5 = counts_3C.double().unbind(0)
    total = images.sum()
    if total == 0:
        raise ValueError("accuracy of zero images")
    present = images > 0
    return {
        "top1": float(top1.sum() / total),
        "top5": float(top5.sum() / total),
        "mean_per_class_recall": float((top1[present] / images[present]).mean()),
    }
