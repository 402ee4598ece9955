"""The repeated parts of a network, which are sharded or compiled one by one."""

from torch import nn


def nested_blocks(tower: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer or convolutional network, and its stages. FSDP2 gathers one at a time.

    Inner blocks come first: `fully_shard` takes those parameters of a module that no earlier call has taken.
    """
    found: list[nn.Module] = []
    for module in reversed(list(tower.modules())):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            is_repeated = len({type(child) for child in module}) == 1
            if is_repeated:
                found += [child for child in module if list(child.parameters())]
    return found
