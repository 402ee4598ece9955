"""features.json: what the features in a folder are. Features that differ in it are never mixed. Beside it lies SHARDS."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.data import FEATURES
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import IMAGE, TEXT, EmbedConfig
from clipscale.data.features import NOTE
from clipscale.distributed.world import World
from clipscale.embed.encode import caption_members
from clipscale.embed.formats import FORMATS
from clipscale.launch.run_lock import RunLock
from clipscale.models.towers import ClipModel

SHARDS = "shards.json"
"""The file that says, for each of the files with features, its source, its samples, and how many of these lack each feature."""


def features_note(config: EmbedConfig, model: ClipModel, settings: ModelConfig, *, tables: bool) -> dict[str, Any]:
    """The note. `tables`: whether a source is a table or a folder of pictures."""
    note = {
        "model": settings.name,
        "weights": model.image_digest(),
        "width": model.width,
        "dtype": config.dtype,
        "member": FEATURES,
        "image_size": config.data.image_size or model.image_size,
        "mean": list(settings.mean),
        "std": list(settings.std),
        "transform": config.transform,
        "inputs": _inputs(config, model, tables=tables),
    }
    return note | ({"text": model.text_digest(), "kinds": list(config.kinds)} if TEXT in config.kinds else {})


def _inputs(config: EmbedConfig, model: ClipModel, *, tables: bool) -> dict[str, Any]:
    """The settings that decide what the towers are given and what is written beside the features: those that apply, by name."""
    data, found = config.data, dict[str, Any]()
    if IMAGE in config.kinds:
        found["data.max_pixels"] = data.max_pixels
        if config.transform == "eval":
            found |= {"model.resize": model.resize, "model.interpolation": model.interpolation}
    if not FORMATS[config.format].all_members:
        found["data.max_bytes"] = data.max_bytes
    if TEXT in config.kinds or not FORMATS[config.format].all_members:
        found["data.captions"] = caption_members(data)
    if tables:
        found |= {f"data.table.{name}": value for name, value in asdict(data.table).items()}
    return found


def write_note(folder: Path, note: dict[str, Any], world: World, lock: RunLock) -> None:
    """Take the folder's lock on rank 0, and write the note. Raises UserError, on every rank, where features of another kind are there.

    Inputs are compared that both notes have: the first start may have read shards alone, and a later one a table too.
    """

    def write() -> None:
        path, found = folder / NOTE, note
        try:
            if path.is_file():
                earlier = dict(files.read_tree(path)["features"])
                if TEXT in earlier and "inputs" not in earlier:
                    raise UserError(
                        f"out={folder}: holds features of an older version, which do not say from which texts; choose another folder"
                    )
                inputs = dict(earlier.pop("inputs", {}))
                names = [(name, inputs, note["inputs"]) for name in sorted(inputs.keys() & note["inputs"].keys())]
                names += [(name, earlier, note) for name in sorted(earlier.keys() | (note.keys() - {"inputs"}))]
                for name, before, now in names:
                    if before.get(name) != now.get(name):
                        what = f"{name}: {str(before.get(name))[:80]}, not {str(now.get(name))[:80]}"
                        raise UserError(f"out={folder}: holds features of another kind ({what}); choose another folder")
                found = note | {"inputs": inputs | note["inputs"]}
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            files.remove_leftovers(folder)
            files.write_json(path, {"features": found})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"out={folder}: cannot be written ({error}); choose another folder") from error

    world.on_main(write)
