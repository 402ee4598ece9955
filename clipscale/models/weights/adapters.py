"""Weights in which PEFT's low-rank adapters (LoRA) lie beside the weights that they change. Imports nothing heavy."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clipscale.common import files
from clipscale.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
# Files of weights in a folder that has only adapters.
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Segments that PEFT puts into names of adapters and of wrapped modules.
ADAPTER = "lora_"
BASE = "base_layer"
# The segment of a module that is saved as a whole beside adapters.
WHOLE_MODULE = "modules_to_save"
# The segments of an adapter's two factors. The change of a weight is B A alpha / r.
FACTOR_A = ".lora_A."
FACTOR_B = ".lora_B."
MERGE_REMEDY = "give what model.merge_and_unload().save_pretrained(FOLDER) writes"
# Settings of PEFT under which an adapter is not alpha / r * B A, unless they are empty.
UNKNOWN_SETTINGS = ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")


def is_adapter(name: str) -> bool:
    return f".{ADAPTER}" in name


def merge_scale(names: Iterable[str], folder: Path, setting: str) -> float:
    """alpha / r of the adapters among these weights, by the configuration beside them; 0 without any.

    Raises UserError for adapters that cannot be merged here.
    """
    every = [*names]
    adapters = [name for name in every if is_adapter(name) or f".{WHOLE_MODULE}." in name]
    if not adapters:
        return 0.0
    with files.damage_to_user_error(f"{setting}: damaged", folder / CONFIG, "download it again"):
        path = folder / CONFIG
        has_config = path.is_file() and path.stat().st_size < MAX_CONFIG_BYTES
        config: dict[str, object] = files.read_json(path) if has_config else {}
    alpha = config.get("lora_alpha")
    rank = config.get("r")
    has_products_alone = all(FACTOR_A in name or FACTOR_B in name for name in adapters)
    plain = has_products_alone and not any(config.get(word) for word in UNKNOWN_SETTINGS)
    bases = {name.replace(f".{BASE}.", ".") for name in every if f".{BASE}." in name}
    targets = {_weight_changed_by(name) for name in adapters}
    if not (plain and isinstance(alpha, int | float) and isinstance(rank, int) and rank > 0 and targets <= bases):
        raise UserError(f"{setting} has adapters of PEFT, such as {adapters[0]}; merge first: {MERGE_REMEDY}")
    return alpha / rank


def _weight_changed_by(name: str) -> str:
    """The weight that an adapter's part changes: MODULE.lora_A.NAME.weight -> MODULE.weight."""
    module = name.partition(FACTOR_A)[0].partition(FACTOR_B)[0]
    return f"{module}.weight"


def merge_run_adapters(state: dict[str, "Tensor"]) -> dict[str, "Tensor"]:
    """A run's weights with its adapters (`model.lora`, whose alpha is r) added. Without adapters they stay as they are.

    The packed projection of open_clip's attention is a layer of its own while it has adapters.
    """
    if not any(map(is_adapter, state)):
        return state
    return {
        re.sub(r"\.attn\.in_proj\.(weight|bias)$", r".attn.in_proj_\1", name): weight
        for name, weight in merge_adapters(state, 1).items()
    }


def merge_adapters(state: Mapping[str, "Tensor"], scale: float) -> dict[str, "Tensor"]:
    """Add their adapters to weights of torch, and leave the adapters out. `scale`: alpha / r.

    Raises what torch raises for other shapes.
    """
    new = {name.replace(f".{BASE}.", "."): value for name, value in state.items() if not is_adapter(name)}
    for name, down in state.items():
        if FACTOR_A in name:
            up = state[name.replace(FACTOR_A, FACTOR_B)]
            new[_weight_changed_by(name)] = new[_weight_changed_by(name)] + scale * (up.float() @ down.float()).to(
                up.dtype
            )
    return new
