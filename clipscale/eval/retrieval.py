"""Retrieval sets, and recall at k in both directions.

N: images, M: captions (several an image), Q: queries, C: candidates, D: feature width, q: queries of one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipscale.common.record import Metrics
from clipscale.eval.encode import MISSED, Encoder, gather_batches
from clipscale.eval.sets.item import EvalSet
from clipscale.loss.reference import dense_contrastive_loss

# Pairs of a batch of the loss on held-out pairs.
LOSS_BATCH = 1024
# Queries ranked at a time; a block's similarities to all candidates are in memory.
BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class RetrievalSet(EvalSet):
    kind = "retrieval"
    main = ("image_to_text_r1", "text_to_image_r1")  # DataComp's mean recall@1

    answers: Sequence[Sequence[str]]

    def measure(self, encoder: Encoder) -> list[Metrics]:
        """Recalls. Every rank ranks the whole set."""
        batches = list(self.pictures(encoder))
        images_ND = gather_batches([features for _, features, _ in batches], len(self), encoder.batch, encoder.world)
        usable = [usable.byte() for _, _, usable in batches]
        usable_N = gather_batches(usable, len(self), encoder.batch, encoder.world).nonzero()[:, 0]
        images_ND = images_ND[usable_N]
        captions = [(text, image) for image, index in enumerate(usable_N.tolist()) for text in self.answers[index]]
        captions_MD = encoder.texts([text for text, _ in captions])
        owner_M = torch.tensor([image for _, image in captions], device=encoder.world.device)
        counts: Metrics = {"images": len(images_ND), "captions": len(captions)}
        pairs = zip(encoder.at_sizes(images_ND), encoder.at_sizes(captions_MD))
        return [self.metrics(encoder, images, texts, owner_M) | counts for images, texts in pairs]

    def metrics(self, encoder: Encoder, images_ND: Tensor, captions_MD: Tensor, owner_M: Tensor) -> Metrics:
        """What `retrieval_metrics` gives for these features; a kind of set adds to it."""
        return retrieval_metrics(images_ND, captions_MD, owner_M)


@dataclass(frozen=True, kw_only=True)
class PairSet(RetrievalSet):
    """Held-out pairs in plain shards. The training loss shows on them whether training works."""

    kind = "pairs"

    def metrics(self, encoder: Encoder, images_ND: Tensor, captions_MD: Tensor, owner_M: Tensor) -> Metrics:
        """Recalls, and where the objective is known the mean `loss` of all whole batches of images, each with its first
        caption, in the set's order. It depends on LOSS_BATCH, and not on how many are encoded at a time."""
        recalls = retrieval_metrics(images_ND, captions_MD, owner_M)
        if encoder.loss is None:
            return recalls
        first_N = torch.searchsorted(owner_M, torch.arange(len(images_ND), device=owner_M.device))
        size = min(LOSS_BATCH, len(images_ND))
        whole = len(images_ND) // size * size
        images, texts = (rows[:whole].split(size) for rows in (images_ND, captions_MD[first_N]))
        model = encoder.model
        bias = 0.0 if model.logit_bias is None else model.logit_bias
        losses = [
            dense_contrastive_loss(
                images_nD, texts_nD, model.logit_scale.exp(), logit_bias=bias, objective=encoder.loss.objective
            )
            for images_nD, texts_nD in zip(images, texts)
        ]
        return {"loss": float(torch.stack(losses).mean())} | recalls


def first_right_ranks(
    queries_QD: Tensor, candidates_CD: Tensor, query_image_Q: Tensor, candidate_image_C: Tensor
) -> Tensor:
    """Rank of each query's first right candidate, from 0: the number of wrong candidates not below the best right one.

    A candidate is right if it belongs to the query's image (int64). Every query has a right candidate. Ties count
    against the model: a wrong answer ranks before an equally similar right one. A NaN never finds its answer.

    Returns (Q,) int64.
    """
    ranks = []
    for queries_qD, image_q in zip(queries_QD.split(BLOCK), query_image_Q.split(BLOCK)):
        scores_qC = queries_qD @ candidates_CD.T
        right_qC = image_q[:, None] == candidate_image_C
        best_q = scores_qC.masked_fill(~right_qC, -torch.inf).amax(1)  # keeps a NaN among the right ones
        before_q = (~(scores_qC < best_q[:, None]) & ~right_qC).sum(1)
        ranks.append(before_q.masked_fill(best_q.isnan(), MISSED))
    return torch.cat(ranks)


def retrieval_metrics(images_ND: Tensor, captions_MD: Tensor, owner_M: Tensor) -> Metrics:
    """`image_to_text_r{1,5,10}`: one of the image's captions is in the top k. `text_to_image_...`: its image is.

    owner_M: (M,) int64, the image of each caption; every image has at least one.
    """
    image_N = torch.arange(len(images_ND), device=owner_M.device)
    ranks = {
        "image_to_text": first_right_ranks(images_ND, captions_MD, image_N, owner_M),
        "text_to_image": first_right_ranks(captions_MD, images_ND, owner_M, image_N),
    }
    return {f"{name}_r{k}": int((values < k).sum()) / len(values) for name, values in ranks.items() for k in (1, 5, 10)}
