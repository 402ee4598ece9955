"""Computes zero-shot classification: class embeddings from prompts, and accuracies from similarities.

n: images or texts, C: classes, P: prompt templates, D: feature width.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.common.record import Metrics


def class_embeddings(
    encode_texts: Callable[[list[str]], Tensor],
    classnames: Sequence[str],
    templates: Sequence[str],
    *,
    batch_size: int,
) -> Tensor:
    """Class embeddings: the normalised mean over templates of normalised prompt features (CLIP, section 3.1.4).

    encode_texts: n texts -> (n, D), called with exactly `batch_size` texts except at the end. templates: with {c} for
    the class. Returns (C, D) float32 on the device of the encoder's output, rows of length 1.
    """
    # Not by str.format, because templates may contain other braces.
    prompts = [template.replace("{c}", name) for name in classnames for template in templates]
    batches = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    features = F.normalize(torch.cat([encode_texts(texts) for texts in batches]).double(), dim=-1)
    # A product with the 0/1 membership matrix adds in a fixed order on every device; index_add does not.
    membership = torch.eye(len(classnames)).repeat_interleave(len(templates), dim=1)
    return F.normalize(membership.to(features) @ features, dim=-1).float()


def target_ranks(scores_nC: Tensor, target_n: Tensor) -> Tensor:
    """The number of other classes that come before the right one; 0 is a top-1 hit.

    If scores are equal, the lower class comes first, as in torch.argmax and so in CLIP_benchmark's class recall. It
    happens: two classes of ImageNet are called "missile", and two "sunglasses". NaNs count against the model.

    scores_nC: (n, C). target_n: (n,) int64. Returns (n,) int64; C where the score of the right class is NaN.
    """
    right_n1 = scores_nC.gather(1, target_n[:, None])
    later_nC = torch.arange(scores_nC.shape[1], device=scores_nC.device) >= target_n[:, None]
    behind_nC = (scores_nC < right_n1) | ((scores_nC == right_n1) & later_nC)
    return torch.where(right_n1[:, 0].isnan(), scores_nC.shape[1], (~behind_nC).sum(1))


def accuracy_metrics(ranks_N: Tensor, target_N: Tensor) -> Metrics:
    """`top1` and `top5`, and `mean_per_class_recall`: the mean top-1 of the classes with images.

    ranks_N: (N,) int64 of all images, from `target_ranks`. target_N: (N,) int64.
    """
    images_C = target_N.bincount()
    hits_C = target_N[ranks_N < 1].bincount(minlength=len(images_C))
    recall = float((hits_C.double() / images_C)[images_C > 0].mean())
    return {f"top{k}": int((ranks_N < k).sum()) / len(ranks_N) for k in (1, 5)} | {"mean_per_class_recall": recall}
