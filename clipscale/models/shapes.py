"""Names and shapes of the weights in files, and whether they are those of a model."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open

from clipscale.common import files
from clipscale.common.record import Record

# By the weights' names.
Shapes = dict[str, tuple[int, ...]]
T = TypeVar("T")
TABLE: Record = files.read_yaml(Path(__file__).with_suffix(".yaml"))
# Where trainers put the weights in a checkpoint, and what wrappers of torch put before their names.
WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.", "model.")


def shapes_of(paths: Iterable[Path]) -> Shapes:
    """Of safetensors and of torch's files. Raises what their readers raise."""
    shapes: Shapes = {}
    for path in paths:
        if path.suffix == ".safetensors":
            with safe_open(path, "np") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        else:
            shapes |= {name: tuple(value.shape) for name, value in unwrapped(saved_by_torch(path)).items()}
    return bare(shapes)


def saved_by_torch(path: Path) -> Record:
    """What torch.save has written, on the meta device: of a zip archive no values are read. Raises what torch.load
    raises, and ValueError for another file."""
    is_zip = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        if not is_zip and file.read(1) != pickle.PROTO:
            raise ValueError("neither safetensors nor written by torch.save")
    import torch  # seconds, which safetensors do not need

    return dict(torch.load(path, map_location="meta", weights_only=True, mmap=is_zip))


def unwrapped(state: Record) -> dict[str, Any]:
    """The tensors of a checkpoint by their names in the model: without what trainers put around and before them."""
    inner = next((state[key] for key in WRAPPERS if isinstance(state.get(key), dict)), None)
    if inner is not None:
        return unwrapped(inner)
    return bare({name: value for name, value in state.items() if hasattr(value, "shape")})


def bare(named: dict[str, T]) -> dict[str, T]:
    """The same by names without prefixes that all have."""
    prefix = next((prefix for prefix in PREFIXES if named and all(name.startswith(prefix) for name in named)), "")
    return bare({name.removeprefix(prefix): value for name, value in named.items()}) if prefix else named


def misfit(shapes: Shapes, values: Record, sections: Sequence[str]) -> str:
    """How weights differ from a model, or its tower, as far as the table knows; empty: not.

    values: the model's description, by `vision_cfg.width` and the like. sections: `vision_cfg`, `text_cfg` or both.
    """
    if "positional_embedding" in shapes:  # open_clip's older layout
        shapes = {name if name.startswith("visual.") else f"text.{name}": shape for name, shape in shapes.items()}
    whole = len(sections) > 1 or any(name.startswith(("visual.", "text.")) for name in shapes)
    for section in sections:
        table = TABLE[section]
        layers = values[f"{section}.layers"]
        if (
            values.get(f"{section}.timm_model_name")
            or values.get(f"{section}.hf_model_name")
            or isinstance(layers, list)
        ):
            if table["only"] in shapes:
                return f"it has {table['only']}"
            continue
        found = [name for name in table["shapes"] if name in shapes]
        if whole and not found:
            return f"it has no {next(iter(table['shapes']))}"
        for name in found:
            wanted = tuple(values.get(f"{section}.{word}", values.get(word, word)) for word in table["shapes"][name])
            if shapes[name] != wanted:
                return f"its {name} is {shapes[name]}, not {wanted}"
        blocks = {match[1] for match in map(re.compile(table["blocks"]).match, shapes) if match}
        if found and len(blocks) != layers:
            return f"its blocks are {len(blocks)}, not {layers}"
    return ""
