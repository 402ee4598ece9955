"""Retrieval sets, and recall at k in both directions.

N: images, M: captions (several an image), Q: queries, C: candidates, D: feature width, q: queries of one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from clipscale.eval.encode import Encoder, join
from clipscale.eval.examples import gallery
from clipscale.eval.sets.item import EvalSet

MISSED = torch.iinfo(torch.int64).max
"""Rank of a query without a usable answer: a miss at every k."""
BLOCK = 1024
"""Queries ranked at a time; a block's similarities to all candidates are in memory."""


@dataclass(frozen=True, kw_only=True)
class RetrievalSet(EvalSet):
    kind = "retrieval"
    main = ("image_to_text_r1", "text_to_image_r1")  # DataComp's mean recall@1

    captions: Sequence[str]
    owner: Sequence[int]
    """The image each caption belongs to; every image has at least one caption."""

    def part(self, chosen: Sequence[int]) -> Self:
        new_index = {old: new for new, old in enumerate(chosen)}
        captions = [m for m, owner in enumerate(self.owner) if owner in new_index]
        owner = [new_index[self.owner[m]] for m in captions]
        return replace(self, captions=[self.captions[m] for m in captions], owner=owner)

    def facts(self) -> dict[str, Any]:
        return {}

    def measure(self, encoder: Encoder, folder: Path | None, step: int | None) -> dict[str, float]:
        """Recalls. Every rank ranks the whole set. Writes examples into `folder`."""
        batches = list(encoder.images(self))
        images_ND = join([features for _, features, _ in batches], len(self), encoder.batch, encoder.world)
        usable = [usable.byte() for _, _, usable in batches]
        usable_N = join(usable, len(self), encoder.batch, encoder.world).bool()
        broken = int((~usable_N).sum())
        captions_MD = encoder.texts(self.captions)
        metrics: dict[str, float] = {"images": len(self), "captions": len(self.captions), "broken": broken}
        if broken < len(self):
            owner_M = torch.tensor(self.owner, device=encoder.world.device)
            metrics = retrieval_metrics(images_ND, captions_MD, owner_M, usable_N) | metrics
            if folder is not None:
                gallery(self, images_ND, captions_MD, usable_N, folder, step)
        return metrics


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


def retrieval_metrics(images_ND: Tensor, captions_MD: Tensor, owner_M: Tensor, usable_N: Tensor) -> dict[str, float]:
    """`image_to_text_r{1,5,10}`: one of the image's captions is in the top k. `text_to_image_...`: its image is.

    owner_M: (M,) int64, the image of each caption; every image has at least one. usable_N: (N,) bool; an image that is
    not is a miss, and so are its captions. The others are ranked without them.
    """
    image_N, usable_M = torch.arange(len(images_ND), device=owner_M.device), usable_N[owner_M]
    images, captions = (images_ND[usable_N], image_N[usable_N]), (captions_MD[usable_M], owner_M[usable_M])
    metrics: dict[str, float] = {}
    for name, (queries, of_queries), (candidates, of_candidates), count in (
        ("image_to_text", images, captions, len(images_ND)),
        ("text_to_image", captions, images, len(captions_MD)),
    ):
        ranks = first_right_ranks(queries, candidates, of_queries, of_candidates)
        metrics |= {f"{name}_r{k}": int((ranks < k).sum()) / count for k in (1, 5, 10)}
    return metrics
