"""The loss in the place of open_clip's, for training loops that are written around that."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clipscale.loss.api import contrastive_loss


class ClipLoss(nn.Module):
    """Called as `open_clip.loss.ClipLoss` is, with the gradients of its `local_loss=True, gather_with_grad=True`.

    That is the gradient of the mean over all ranks' pairs once DDP or FSDP2 has averaged over the ranks, as they do:
    this rank's part times the number of ranks. (`gather_with_grad=False` gives the towers a part of it only.) The value
    is the mean over all ranks' pairs.

    Args:
        rank, world_size, local_loss, gather_with_grad, cache_labels, use_horovod: open_clip's. With world_size=1 the
            process is by itself; the others change nothing.
        group: the ranks, as a process group or a mesh of one dimension; None: all.
        options: of `contrastive_loss`, such as exchange="gather". The first step checks its inputs, unless check=False.
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
        self.options = {"check": True} | options | ({"exchange": "none"} if world_size == 1 else {})

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, 0-d, or {"contrastive_loss": it}. Features are (n, D) of this rank; a bias changes no softmax."""
        loss = contrastive_loss(image_features, text_features, logit_scale, group=self.group, **self.options)
        self.options["check"] = False
        # The same value; gradients that have been averaged over the ranks are then those of the mean.
        loss = loss.detach() + self.world_size * (loss - loss.detach())
        return {"contrastive_loss": loss} if output_dict else loss
