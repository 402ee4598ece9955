"""Finds pairs that are no negatives: samples that share a key (the same caption or picture), an image's captions.

A tile of the torch backend leaves such pairs out, or takes them as positives (`Block.left_out`, `RowBlock.share`).

Letters: n rows (images) and m columns (texts), k captions of an image.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.loss.exchange import Communicator
from clipscale.loss.inputs import Inputs


def with_shares(inputs: Inputs, comm: Communicator | None, positive: bool) -> Inputs:
    """The inputs with each sample's share, if its pairs of equal keys are `positive`. Without keys where no two samples
    share one.

    It gathers the keys of all ranks, and waits for the device.
    """
    n = len(inputs.rows)
    k = inputs.captions
    rows, cols = inputs.beside
    if k == 1 and "keys" not in rows:
        return inputs
    if "keys" in rows:
        row_keys, col_keys = rows["keys"], cols["keys"]
    else:
        row_keys = torch.arange(n, device=inputs.rows.device) + (comm.rank * n if comm else 0)
        col_keys = F.pad(row_keys.repeat(k), (0, len(inputs.cols) - k * n), value=-1)

    def equal(keys: Tensor, among: Tensor) -> Tensor:
        """How many of all ranks' keys are equal to each."""
        ordered = (comm.gather(among) if comm else among).sort()[0]
        return torch.searchsorted(ordered, keys, right=True) - torch.searchsorted(ordered, keys)

    texts, images = equal(row_keys, col_keys), equal(col_keys, row_keys)
    others = (texts - 1).sum()
    if int(comm.reduce(others) if comm else others) == 0:
        return replace(inputs, beside=({}, {}))
    sides = []
    for side, keys, count in ((rows, row_keys, texts), (cols, col_keys, images)):
        share = {"share": 1 / count.clamp_min(1).double()} if positive else {}  # a hard negative may have no image
        sides.append(side | {"keys": keys} | share)
    return replace(inputs, beside=(sides[0], sides[1]))
