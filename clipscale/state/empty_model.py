"""A model that begins without memory, so that under FSDP2 no device ever holds all of it: it is sharded first and filled afterwards."""

from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale.config.sections import ModelConfig
from clipscale.distributed.world import World, copy_into
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import without_weights


class EmptyModel:
    """The model of the settings on torch's meta device, and on rank 0 its weights in host memory until `fill` distributes them.

    `suits` is false for batch normalisation, which is made synchronous by the device that it lies on. Raises UserError, on every rank,
    for weights that do not fit.
    """

    def __init__(self, config: ModelConfig, world: World) -> None:
        self._world, self._source = world, dict[str, Tensor]()
        with torch.device("meta"):
            self.model: ClipModel = build_model(without_weights(config))
        self.suits = not any(isinstance(module, _BatchNorm) for module in self.model.modules())
        if self.suits:
            world.on_main(lambda: self._source.update(tensors_of(build_model(config))))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Parameters and buffers of one part, by their names within it, in host memory; on rank 0, before `fill`."""
        return {name.removeprefix(prefix): x for name, x in self._source.items() if name.startswith(prefix)}

    def fill(self) -> None:
        """Give the model memory and weights, tensor by tensor. Sharded parameters take their shards. All ranks call it."""
        self.model.to_empty(device=self._world.device)
        with torch.no_grad():
            for name, target in tensors_of(self.model):
                value = torch.empty(target.shape, dtype=target.dtype, device=self._world.device)
                if self._world.main:
                    value.copy_(self._source.pop(name))
                dist.broadcast(value, 0)
                copy_into(target, value)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by name, those that no state dict holds included."""
    return chain(model.named_parameters(), model.named_buffers())
