"""Reads files of weights, which may come from strangers: nothing in them runs, and a damaged one is one error.

A file is torch's archive, safetensors, or an index of several safetensors files.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from clipscale.common import files

WRAPPERS = ("state_dict", "model")
"""Entries in which trainers keep the weights."""
MOST_FILES = 10_000
"""Files of one model. The largest known one has a few hundred."""


def read(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, by name. Raises ValueError, OSError, and the errors of torch and safetensors, of many kinds."""
    if path.name.endswith(".index.json"):
        found = _indexed(path)
    elif path.suffix == ".safetensors":
        found = _safetensors(path)
    else:
        found = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in WRAPPERS:
        found = found[wrapper] if isinstance(found, dict) and isinstance(found.get(wrapper), dict) else found
    if not isinstance(found, dict):
        raise ValueError("it holds no names and tensors")
    named = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not named:
        raise ValueError("it holds no tensors")
    return {name.removeprefix("module."): value for name, value in named.items()}


def _safetensors(path: Path) -> dict[str, Any]:
    files.opened(path).close()  # a FIFO or device is refused
    return dict(load_file(path))


def _indexed(path: Path) -> dict[str, Any]:
    """The tensors of all files that an index names. They lie beside it."""
    index = files.read_json(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError("it names no files")
    parts = sorted({Path(name).name for name in places.values()})
    if len(parts) > MOST_FILES:
        raise ValueError(f"it names more than {MOST_FILES} files")
    state: dict[str, Any] = {}
    for part in parts:
        state |= _safetensors(path.parent / part)
    return state
