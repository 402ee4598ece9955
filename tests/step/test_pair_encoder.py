"""A captioner as one encoder of pairs."""

import torch

from clipscale.distributed.world import World
from clipscale.step.pair_encoder import wrapped_pair_encoder
from tests.support.ranks import run_ranks
from tests.support.towers import captioned, small_captioner


def dtypes_gathered(rank: int, ranks: int) -> list[torch.dtype]:
    """Returns the dtypes of a weight of either tower and of the decoder during a forward pass."""
    model = small_captioner()
    seen: list[torch.dtype] = []
    assert model.decoder is not None
    for module in (model.image, model.text, model.decoder):
        linear = next(each for each in module.modules() if isinstance(each, torch.nn.Linear))
        linear.register_forward_pre_hook(lambda each, _: seen.append(each.weight.dtype))
    world = World(rank, ranks, torch.device("cpu"))
    encoder = wrapped_pair_encoder(model, world, "zero3", torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoder(*captioned(4))
    return seen


def test_sharded_weights_are_gathered_in_the_dtype_of_the_matrices() -> None:
    for seen in run_ranks(dtypes_gathered, 2):
        assert set(seen) == {torch.bfloat16}
        assert len(seen) >= 3
