"""Chooses the tiles of a large block by a short trial on its GPU, whose result is kept in the user's cache folder.

The trial comes before a call's first exchange, and each rank makes its own choice: tiles change rounding, and neither
what ranks send nor when. A machine that has chosen keeps its choice, so that its runs add in the same order.
"""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton

from clipscale.common.files import user_cache, write_text
from clipscale.loss.autograd import ContrastiveLoss, LossCall
from clipscale.loss.exchange import Single
from clipscale.loss.inputs import Inputs
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Objective
from clipscale.loss.similarity import Dot
from clipscale.loss.triton.tuning import Tiles

_log = logging.getLogger(__name__)
SIDE = 2**13
"""Rows and columns of the trial. Smaller blocks take the first candidate: their time is nothing beside a step's."""
LIMIT_S = 2.0
"""Of GPU time, after which no further candidate begins. Six take some tenths on an H100. Compiling is not counted: once
on a machine, since Triton keeps what it has compiled."""
RUNS = 8
"""Of a candidate, where one takes more than some milliseconds."""
BETTER = 0.98
"""Share of the first candidate's time under which another is taken."""
_chosen: dict[Path, Tiles] = {}


def chosen_tiles(objective: Objective, inputs: Inputs, machine: Machine) -> Tiles:
    """The tiles for a call. The machine's first candidate without gradients, for small blocks, and with
    CLIPSCALE_LOSS_TRIAL=0."""
    rows = inputs.rows
    candidates = machine.candidates(rows.device, inputs.dtype)
    is_small = min(len(rows), len(inputs.cols)) < SIDE
    is_off = os.environ.get("CLIPSCALE_LOSS_TRIAL") == "0" or not torch.is_grad_enabled()
    if len(candidates) == 1 or is_small or is_off:
        return candidates[0]
    of = f"{machine.name(rows.device)} {type(objective).__name__} {inputs.dtype} {rows.shape[1]} {triton.__version__}"
    path = user_cache() / "tiles" / re.sub(r"[^\w.]+", "-", of)
    if path not in _chosen:
        text = path.read_text(errors="replace") if path.is_file() else ""
        kept = [tiles for tiles in candidates if str(tiles) == text]
        _chosen[path] = kept[0] if kept else tried(path, candidates, objective, inputs, machine)
    return _chosen[path]


def tried(path: Path, candidates: Sequence[Tiles], objective: Objective, inputs: Inputs, machine: Machine) -> Tiles:
    """The fastest, which the file keeps. The first where anything fails, and nothing is kept."""
    seconds: dict[Tiles, float] = {}
    try:
        for tiles in candidates:
            if sum(seconds.values()) * RUNS < LIMIT_S:
                work = partial(step, tiles, objective, inputs, machine)
                seconds[tiles] = machine.seconds(work, inputs.rows.device)
        seconds[candidates[0]] *= BETTER
        chosen = min(seconds, key=seconds.__getitem__)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, str(chosen))
    except Exception as error:
        _log.warning("the loss keeps its usual tiles, since their trial failed: %s", error)
        return candidates[0]
    _log.info("tiles of the loss: %s, the fastest of %s", chosen, seconds)
    return chosen


def step(tiles: Tiles, objective: Objective, inputs: Inputs, machine: Machine) -> None:
    """Value and gradients of the first SIDE rows and columns, by themselves."""
    u, v = (x[:SIDE].detach().requires_grad_() for x in (inputs.rows, inputs.cols))
    small = replace(inputs, rows=u, cols=v)
    call = LossCall(Single(), objective.kernels()(machine, tiles), Dot(), objective, small, check=False, trains=True)
    ContrastiveLoss.apply(call, u, v, inputs.scale.detach(), inputs.bias.detach()).backward()
