"""Retrieval sets, and recall at k in both directions.

N: images, M: captions (several an image), Q: queries, C: candidates, D: feature width, q: queries of one block,
K: different pairs, G: groups of equal candidates.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clipscale.common.record import Metrics
from clipscale.data.filters import comparable_caption, key_of_value
from clipscale.data.hashing import hash64
from clipscale.eval.caption_meter import CaptionMeter
from clipscale.eval.encode import MISSED, EvalEncoder, ImageBatch, gather_batches
from clipscale.eval.sets.item import EvalSet, Measurement, warn_once
from clipscale.loss.reference import dense_contrastive_loss

# Pairs of a batch of the loss on held-out pairs.
LOSS_BATCH = 1024
# Queries ranked at a time; a block's similarities to all candidates are in memory.
BLOCK = 1024


@dataclass(frozen=True)
class Relevance:
    """Which captions are relevant for which images, and so right answers.

    A caption is relevant for an image if an equal caption belongs to an equal image.
    """

    # (M,) int64: the image that each caption belongs to. Every image has at least one caption.
    owner: Tensor
    # (N,) int64 from 0: equal for equal images.
    image_id: Tensor
    # (M,) int64 from 0: equal for equal captions.
    caption_id: Tensor

    @classmethod
    def for_distinct_captions(cls, owner_M: Tensor) -> "Relevance":
        """Takes no two images and no two captions as equal."""
        image_N = torch.arange(num_distinct(owner_M), device=owner_M.device)
        return cls(owner_M, image_N, torch.arange(len(owner_M), device=owner_M.device))

    @property
    def pairs(self) -> Tensor:
        """(K, 2) int64: the ids of an image and of a caption that is relevant for it."""
        return torch.stack([self.image_id[self.owner], self.caption_id], 1).unique(dim=0)


@dataclass(frozen=True, kw_only=True)
class RetrievalSet(EvalSet):
    """Published captions. As in clip-benchmark, each caption is right for its own image alone, equal ones or not."""

    kind = "retrieval"
    default_main_metrics = ("image_to_text_r1", "text_to_image_r1")  # DataComp's mean recall@1
    # What a warning says about equal captions and pictures.
    equal_rule: ClassVar[str] = "an equal caption of another picture is wrong, as in clip-benchmark"

    answers: Sequence[Sequence[str]]

    def measure(self, encoder: EvalEncoder) -> Measurement:
        """Measure the recalls, and how well a captioner predicts each picture's first caption.

        Every rank ranks the whole set.
        """
        meter = CaptionMeter(encoder, self.answers) if encoder.model.is_captioner else None
        reads = HashedReads(self.read)
        broken: Counter[str] = Counter()
        batches = [*self.encode_pictures(encoder, broken, reads.read, meter.add if meter else None)]
        index_N, images_ND, hash_N = gather_usable(batches, reads, len(self), encoder)
        captions = [(text, image) for image, index in enumerate(index_N.tolist()) for text in self.answers[index]]
        captions_MD = encoder.encode_texts([text for text, _ in captions])
        device = encoder.world.device
        owner_M = torch.tensor([image for _, image in captions], device=device)
        keys = [key_of_value(comparable_caption(text), str(number)) for number, (text, _) in enumerate(captions)]
        relevance = Relevance(
            owner_M, image_id=dense_ids(hash_N), caption_id=dense_ids(torch.tensor(keys, device=device))
        )
        counts: Metrics = {"images": len(images_ND), "captions": len(captions)}
        if meter:
            counts |= meter.metrics(index_N)
        if encoder.world.is_rank0:
            self.warn_of_equal(relevance)
        pairs = zip(encoder.at_sizes(images_ND), encoder.at_sizes(captions_MD))
        metrics = [self.metrics(encoder, images, texts, relevance) | counts for images, texts in pairs]
        return Measurement(metrics, broken, meter.write(index_N) if meter else [])

    def warn_of_equal(self, relevance: Relevance) -> None:
        """Warn if some captions or pictures are equal, with the numbers of distinct ones."""
        counts = [
            f"{len(ids):,} {name}, {num_distinct(ids):,} distinct"
            for name, ids in (("captions", relevance.caption_id), ("pictures", relevance.image_id))
            if num_distinct(ids) < len(ids)
        ]
        if counts:
            warn_once(f"eval.sets: {self.path}: {'; '.join(counts)}; {self.equal_rule}")

    def metrics(self, encoder: EvalEncoder, images_ND: Tensor, captions_MD: Tensor, relevance: Relevance) -> Metrics:
        """The `retrieval_metrics` of these features."""
        return retrieval_metrics(images_ND, captions_MD, Relevance.for_distinct_captions(relevance.owner))


@dataclass(frozen=True, kw_only=True)
class PairSet(RetrievalSet):
    """Held-out pairs in plain shards. Equal captions and equal pictures are right answers.

    The training's loss on them shows whether training works.
    """

    kind = "pairs"
    equal_rule = "equal ones are right answers"

    def metrics(self, encoder: EvalEncoder, images_ND: Tensor, captions_MD: Tensor, relevance: Relevance) -> Metrics:
        """These metrics:

        - the recalls;
        - `distinct`, the number of distinct captions, if some repeat;
        - `loss`, if the objective is known: its mean over all full batches of LOSS_BATCH images, each with its first
          caption, in the set's order. It does not depend on how many images are encoded at a time.
        """
        recalls = retrieval_metrics(images_ND, captions_MD, relevance)
        if num_distinct(relevance.caption_id) < len(captions_MD):
            recalls["distinct"] = num_distinct(relevance.caption_id)
        if not encoder.objective:
            return recalls
        first_N = torch.searchsorted(relevance.owner, torch.arange(len(images_ND), device=images_ND.device))
        size = min(LOSS_BATCH, len(images_ND))
        used = len(images_ND) // size * size
        images, texts = (rows[:used].split(size) for rows in (images_ND, captions_MD[first_N]))
        model = encoder.model
        bias = 0.0 if model.logit_bias is None else model.logit_bias
        losses = [
            dense_contrastive_loss(
                images_nD, texts_nD, model.logit_scale.exp(), logit_bias=bias, objective=encoder.objective
            )
            for images_nD, texts_nD in zip(images, texts)
        ]
        return {"loss": float(torch.stack(losses).mean())} | recalls


class HashedReads:
    """Reads a set's pictures in the encoder's threads, and keeps the hash of each one's bytes."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._hashes: dict[int, int] = {}

    def read(self, index: int) -> bytes:
        data = self._read(index)
        self._hashes[index] = hash64(data) - (1 << 63)
        return data

    def hashes(self, span: range) -> Tensor:
        """The hashes of the pictures of a span, (n,) int64; 0 for a picture that could not be read."""
        return torch.tensor([self._hashes.get(index, 0) for index in span], dtype=torch.int64)


def gather_usable(
    batches: list[ImageBatch], reads: HashedReads, count: int, encoder: EvalEncoder
) -> tuple[Tensor, Tensor, Tensor]:
    """The usable images of a set, gathered from all ranks. A collective.

    `batches`: this rank's. `count`: the number of images in the set.

    Returns each image's index in the set, (N,) int64; features (N, D); hashes, (N,) int64, equal for equal files.
    """

    def gathered(rows: list[Tensor]) -> Tensor:
        return gather_batches(rows, count, encoder.batch_size, encoder.world)

    hashes = gathered([reads.hashes(span).to(encoder.world.device) for span, _, _ in batches])
    index_N = gathered([usable.byte() for _, _, usable in batches]).nonzero()[:, 0]
    return index_N, gathered([features for _, features, _ in batches])[index_N], hashes[index_N]


def dense_ids(values: Tensor) -> Tensor:
    """Numbers from 0, equal for equal values: int64, in the values' shape."""
    return values.unique(return_inverse=True)[1]


def num_distinct(ids: Tensor) -> int:
    """The number of distinct ids."""
    return int(ids.max()) + 1


def first_right_ranks(
    queries_QD: Tensor, candidates_CD: Tensor, id_Q: Tensor, id_C: Tensor, pairs_K2: Tensor
) -> Tensor:
    """Rank of each query's first right candidate, from 0: the number of wrong candidates not below the best right one.

    A candidate is right if the query's id and its own (int64, from 0) are among the pairs. Every query has a right
    candidate. Ties count against the model: a wrong answer ranks before an equally similar right one. A NaN never finds
    its answer.

    Returns (Q,) int64.
    """
    ranks = []
    for queries_qD, id_q in zip(queries_QD.split(BLOCK), id_Q.split(BLOCK)):
        scores_qC = queries_qD @ candidates_CD.T
        row, pair = (id_q[:, None] == pairs_K2[:, 0]).nonzero(as_tuple=True)
        right_qG = torch.zeros(len(id_q), num_distinct(id_C), dtype=torch.bool, device=id_q.device)
        right_qG[row, pairs_K2[pair, 1]] = True
        right_qC = right_qG.gather(1, id_C.expand(len(id_q), -1))
        best_q = scores_qC.masked_fill(~right_qC, -torch.inf).amax(1)  # keeps a NaN among the right ones
        before_q = (~(scores_qC < best_q[:, None]) & ~right_qC).sum(1)
        ranks.append(before_q.masked_fill(best_q.isnan(), MISSED))
    return torch.cat(ranks)


def retrieval_metrics(images_ND: Tensor, captions_MD: Tensor, relevance: Relevance) -> Metrics:
    """Recall at k = 1, 5 and 10 in both directions.

    `image_to_text_r{k}`: the share of images with a relevant caption in the top k. `text_to_image_r{k}`: the share of
    captions that have an image for which they are relevant in the top k.
    """
    image_N = relevance.image_id
    caption_M = relevance.caption_id
    pairs_K2 = relevance.pairs
    ranks = {
        "image_to_text": first_right_ranks(images_ND, captions_MD, image_N, caption_M, pairs_K2),
        "text_to_image": first_right_ranks(captions_MD, images_ND, caption_M, image_N, pairs_K2.flip(1)),
    }
    return {f"{name}_r{k}": int((values < k).sum()) / len(values) for name, values in ranks.items() for k in (1, 5, 10)}
