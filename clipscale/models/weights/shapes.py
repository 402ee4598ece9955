"""Names and shapes of the weights in files, and whether a model has the same."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypedDict

from safetensors import safe_open

from clipscale.common import files
from clipscale.models.weights import adapters
from clipscale.models.weights.key_styles import choose_weight_set, listed


class NamesTable(TypedDict):
    """An entry of shapes.yaml, for a tower of open_clip. It has the names in a whole model."""

    # A weight that towers of other packages alone have.
    only: str
    # Weight -> its shape, in words of the description.
    shapes: dict[str, list[str | int]]
    # The pattern of names whose first group is a block's number.
    blocks: str


# Name of a weight -> its shape.
Shapes = dict[str, tuple[int, ...]]
TABLE: dict[str, NamesTable] = files.read_yaml(Path(__file__).with_suffix(".yaml"))


def shapes_of(paths: Iterable[Path], key: str, setting: str) -> Shapes:
    """The shapes of the weights in files of safetensors or torch, by the files' own names.

    `key`: the path of the set of weights; see `key_styles.choose_weight_set`.

    Raises UserError, and what their readers raise.
    """
    shapes: Shapes = {}
    for path in paths:
        content = _read_safetensors_shapes(path) if path.suffix == ".safetensors" else saved_by_torch(path)
        shapes |= {name: tuple(value.shape) for name, value in choose_weight_set(content, key, setting).tensors.items()}
        adapters.merge_scale(shapes, path.parent, setting)
    return {name: shape for name, shape in shapes.items() if not adapters.is_adapter(name)}


def _read_safetensors_shapes(path: Path) -> dict[str, object]:
    with safe_open(path, "np") as file:
        return {name: SimpleNamespace(shape=file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def saved_by_torch(path: Path, device: str = "meta") -> dict[str, object]:
    """Read what torch.save has written. For the meta device no values are read. Executes no code.

    Raises what torch.load raises, and ValueError for another file.
    """
    is_zip = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        if not is_zip and file.read(1) != pickle.PROTO:
            raise ValueError("neither safetensors nor written by torch.save")
    import torch  # imported here: it takes seconds, and files of safetensors do not need it

    try:
        content = torch.load(path, map_location=device, weights_only=True, mmap=is_zip and device == "meta")
    except pickle.UnpicklingError as error:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
        content_found = f"objects of Python, as {classes[0]}," if classes else "more than weights, or it is damaged,"
        raise ValueError(f"it holds {content_found} which are not loaded; save model.state_dict() alone") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not weights by name; save model.state_dict()")
    return content


def mismatch_message(
    shapes: Shapes, values: Mapping[str, object], sections: Sequence[str], unmatched: Sequence[str] = ()
) -> str:
    """The message about weights that differ from a model or its tower; empty if the table shows no difference.

    shapes: by the names of a whole model. values: the model's description, by `vision_cfg.width` and the like.
    sections: `vision_cfg`, `text_cfg` or both. unmatched: the file's other keys.
    """
    for section in sections:
        if problem := _section_mismatch(shapes, values, section, unmatched or sorted(shapes)):
            return problem
    return ""


def _section_mismatch(shapes: Shapes, values: Mapping[str, object], section: str, theirs: Sequence[str]) -> str:
    table = TABLE[section]
    layers = values[f"{section}.layers"]
    remedy = "; give another model="
    if values.get(f"{section}.timm_model_name") or values.get(f"{section}.hf_model_name") or isinstance(layers, list):
        return f"it has {table['only']}{remedy}" if table["only"] in shapes else ""
    shared = [name for name in table["shapes"] if name in shapes]
    if not shared:
        return naming_mismatch(next(iter(table["shapes"])), theirs)
    for name in shared:
        wanted = tuple(
            word if isinstance(word, int) else values.get(f"{section}.{word}", values.get(word, word))
            for word in table["shapes"][name]
        )
        if shapes[name] != wanted:
            return f"its {name} is {shapes[name]}, not {wanted}{remedy}"
    blocks = {match[1] for match in map(re.compile(table["blocks"]).match, shapes) if match}
    return "" if len(blocks) == layers else f"its blocks are {len(blocks)}, not {layers}{remedy}"


def naming_mismatch(ours: str, theirs: Sequence[str]) -> str:
    """The message where the names differ, with one name of the model's and some of the file's.

    It proposes no other size of the model: that would not help.
    """
    return f"the names differ: no {ours}, but {listed(theirs)}; rename them as the model's"
