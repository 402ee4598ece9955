"""Chooses the tiles of a large block by a short trial on its GPU, whose result is kept in the user's cache folder.

The trial comes before a call's first exchange, and each rank makes its own choice: tiles change rounding, and neither
what ranks send nor when. A machine that has chosen keeps its choice, so that its runs add in the same order.
"""

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import triton

from clipscale.common.files import user_cache, write_json
from clipscale.loss.autograd import ContrastiveLoss, LossCall
from clipscale.loss.exchange import Single
from clipscale.loss.inputs import Inputs
from clipscale.loss.machine import REPEATS, Machine
from clipscale.loss.objective import Objective
from clipscale.loss.similarity import Dot
from clipscale.loss.triton.tuning import Tiles

_log = logging.getLogger(__name__)
SIDE = 2**13
"""Rows and columns of the trial. Smaller blocks take the first candidate: their time is nothing beside a step's."""
LIMIT_S = 2.0
"""Of GPU time, after which no further candidate begins. Six take some hundredths on an H100. Compiling is not counted:
once on a machine, since Triton keeps what it has compiled."""
BETTER = 0.98
"""Share of the first candidate's time under which another is taken."""
_chosen: dict[Path, Tiles] = {}


def chosen_tiles(objective: Objective, inputs: Inputs, machine: Machine) -> Tiles | None:
    """The tiles for a call with gradients. None: the machine's first candidate, as for small blocks, for keys, whose
    kernels spill in wide tiles, and with CLIPSCALE_LOSS_TRIAL=0."""
    device, sides = inputs.rows.device, (inputs.rows, inputs.cols)
    candidates = machine.candidates(device, inputs.dtype)
    is_small = min(map(len, sides)) < SIDE
    if len(candidates) == 1 or is_small or "keys" in inputs.beside[0] or not torch.is_grad_enabled():
        return None
    if os.environ.get("CLIPSCALE_LOSS_TRIAL") == "0":
        return None
    name = type(objective).__name__
    kind = f"{machine.name(device)} triton {triton.__version__} {name} {inputs.dtype} {inputs.rows.shape[1]}"
    path = user_cache() / "tiles" / (re.sub(r"[^\w.]+", "-", kind) + ".json")
    if path not in _chosen:
        _chosen[path] = remembered(path, candidates) or tried(path, candidates, objective, inputs, machine)
    return _chosen[path]


def remembered(path: Path, candidates: Sequence[Tiles]) -> Tiles | None:
    """What an earlier trial chose, if it still is a candidate."""
    try:
        kept = json.loads(path.read_text())["chosen"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((tiles for tiles in candidates if asdict(tiles) == kept), None)


def tried(path: Path, candidates: Sequence[Tiles], objective: Objective, inputs: Inputs, machine: Machine) -> Tiles:
    """Time the candidates, and keep the choice. The first where anything fails, and nothing is kept."""
    first = candidates[0]
    seconds: list[float] = []
    try:
        for tiles in candidates:
            if sum(seconds) * REPEATS < LIMIT_S:
                work = partial(step, tiles, objective, inputs, machine)
                seconds.append(machine.seconds(work, inputs.rows.device))
        fastest = min(range(len(seconds)), key=seconds.__getitem__)
        chosen = candidates[fastest] if seconds[fastest] < BETTER * seconds[0] else first
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"chosen": asdict(chosen), "seconds": seconds})
    except Exception as error:
        _log.warning("no trial of the loss's tiles, which stay %s: %s", first, error)
        return first
    _log.info("tiles of the loss: %s, by a trial that %s keeps", chosen, path)
    return chosen


def step(tiles: Tiles, objective: Objective, inputs: Inputs, machine: Machine) -> None:
    """Value and gradients of the first SIDE rows and columns, by themselves."""
    u, v = (x[:SIDE].detach().requires_grad_() for x in (inputs.rows, inputs.cols))
    small = replace(inputs, rows=u, cols=v, captions=1)
    call = LossCall(Single(), objective.kernels(machine, tiles), Dot(), objective, small, check=False, trains=True)
    ContrastiveLoss.apply(call, u, v, inputs.scale.detach(), inputs.bias.detach()).backward()
