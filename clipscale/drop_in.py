"""The loss in the places of open_clip's and sentence-transformers' losses, for training loops that are written around those.

Letters: n rows of this rank, m columns, D feature width, P ranks.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clipscale.loss.api import contrastive_loss


class ClipLoss(nn.Module):
    """Called as `open_clip.loss.ClipLoss` is, with the gradients of its `local_loss=True, gather_with_grad=True`.

    That is the gradient of the mean over all ranks' pairs once DDP or FSDP2 has averaged over the ranks, as they do: this rank's part
    times the number of ranks. (`gather_with_grad=False` gives the towers a part of it only.) The value is the mean over all ranks' pairs.

    Args:
        rank, world_size, local_loss, gather_with_grad, cache_labels, use_horovod: open_clip's. With world_size=1 the process is by
            itself; the others change nothing.
        group: the ranks, as a process group or a mesh of one dimension; None: all.
        options: of `contrastive_loss`, such as exchange="gather".
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.world_size, self.group = world_size, group
        self.options = options | ({"exchange": "none"} if world_size == 1 else {})

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, 0-d, or {"contrastive_loss": it}. The features are (n, D) of this rank; the bias changes no softmax."""
        loss = contrastive_loss(image_features, text_features, logit_scale, group=self.group, **self.options)
        loss = _for_averaged_gradients(loss, self.world_size)
        return {"contrastive_loss": loss} if output_dict else loss


class RankingLoss:
    """`calculate_loss` of sentence-transformers' `CachedMultipleNegativesRankingLoss`, without its matrix of mini_batch_size x m scores.

    Queries are rows; their documents and everybody's hard negatives are columns. With `gather_across_devices` the value is the mean over
    all ranks' queries, where theirs is this rank's mean; gradients are the same. Settings that the loss does not have (other
    similarities, directions and partitions, hardness weights) are computed by sentence-transformers.

    Comes before their class among the bases of `CachedMultipleNegativesRankingLoss`, from which it has the other attributes.
    """

    group: dist.ProcessGroup | DeviceMesh | None = None
    """The ranks, where not all of them; set it after construction."""
    normalizes: dict[Callable[..., Tensor], bool] = {}  # noqa: RUF012 - a constant
    """The similarity functions that the loss has, and whether they normalise their inputs."""
    OBJECTIVES = {("query_to_doc",): "softmax_image", ("doc_to_query", "query_to_doc"): "softmax"}  # noqa: RUF012
    """By the sorted directions."""

    def calculate_loss(
        self, reps: Sequence[Sequence[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss, 0-d, of representations: a list of chunks (c, D) for each column of texts, queries first.

        With `with_backward` the representations get their gradients, and the value has none.
        """
        theirs: Any = self
        objective = self.OBJECTIVES.get(tuple(sorted(theirs.directions)))
        joined = objective == "softmax" and theirs.partition_mode == "joint"  # one softmax over both directions
        hard = theirs.hardness_mode is not None and theirs.hardness_strength > 0
        if objective is None or joined or hard or theirs.similarity_fct not in self.normalizes:
            return super().calculate_loss(reps, labels, with_backward=with_backward)  # type: ignore[misc]
        queries, documents = torch.cat(list(reps[0])), torch.cat([x for column in reps[1:] for x in column])
        if self.normalizes[theirs.similarity_fct]:
            queries, documents = F.normalize(queries), F.normalize(documents)
        gathers = theirs.gather_across_devices and dist.is_available() and dist.is_initialized()
        exchange, group = ("auto" if gathers else "none"), self.group
        loss = contrastive_loss(
            queries, documents, theirs.scale, objective=objective, exchange=exchange, group=group, check=False
        )
        if gathers:
            loss = _for_averaged_gradients(loss, group.size() if group is not None else dist.get_world_size())
        if with_backward:
            loss.backward()
        return loss.detach() if with_backward else loss


def _for_averaged_gradients(loss: Tensor, ranks: int) -> Tensor:
    """The same value; gradients that have been averaged over the ranks, as DDP and FSDP2 do, are then those of the mean."""
    return loss.detach() + ranks * (loss - loss.detach())


@cache
def _ranking_loss() -> type:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Theirs
    from sentence_transformers.util import cos_sim, dot_score

    about = {"normalizes": {cos_sim: True, dot_score: False}, "__module__": __name__, "__doc__": RankingLoss.__doc__}
    return type("CachedMultipleNegativesRankingLoss", (RankingLoss, Theirs), about)


def __getattr__(name: str) -> Any:
    """sentence-transformers, which takes seconds to import, is imported where its class is asked for."""
    if name == "CachedMultipleNegativesRankingLoss":
        return _ranking_loss()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
