"""Finds weights: tags of open_clip, files, folders of open_clip and transformers, runs.

Imports nothing heavy but for a repository or a file of torch.save: a mistake is reported at once. Names are looked up
on the network only where the setting itself is a tag or begins with hf-hub:.
"""

import re
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError, to_user_error
from clipscale.common.remote import announced
from clipscale.common.text import did_you_mean
from clipscale.config.libraries import model_description, pretrained
from clipscale.config.model import ModelConfig
from clipscale.models.weights import adapters
from clipscale.models.weights.descriptions import (
    UNKNOWN_MODEL,
    checked_pixels,
    comparable,
    described_model,
    described_tower,
    least_parameters,
)
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.run_folder.paths import checkpoint_values, is_run_or_checkpoint, run_folder

HUB = "hf-hub:"
# Separates a path from the key of a set of weights in it.
SET = "::"
# May begin the name or path of a run; needed where a folder has weights of its own, too.
RUN = "run:"
# End of the name of a file that lists files of weights.
INDEX = ".index.json"
# Names of weights in a folder. The first that exists is taken.
WEIGHTS = ("open_clip_model.safetensors", "model.safetensors", "model.safetensors.index.json",
           "open_clip_pytorch_model.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")  # fmt: skip
MAX_JSON_BYTES = 2**26
FETCH_REMEDY = "; download it elsewhere, give it"


@dataclass(frozen=True)
class Source:
    """The place of weights, and their model."""

    # The setting that names them, with its value: the beginning of messages.
    setting: str
    # A file, a run's checkpoint, or a folder.
    path: Path
    # The files of weights; empty for a checkpoint.
    shards: tuple[Path, ...] = ()
    # The model, by the configuration beside the weights. Without a name its architecture is not known.
    model: ModelConfig = UNKNOWN_MODEL
    # Which of several sets of weights; empty: the usual one.
    key: str = ""

    def unreadable_to_user_error(self) -> AbstractContextManager[None]:
        """Context of code that reads the files. Raises UserError for damaged ones."""
        return to_user_error(f"{self.setting} cannot be read as weights")


def find_source(value: str, name: str, setting: str = "model.weights") -> Source:
    """The weights that a setting names, perhaps by a tag of the architecture `name`. Raises UserError."""
    origin = f"{setting}={value!r}"
    source = local_source(value, setting)
    if source:
        return source
    with to_user_error(f"{origin} cannot be fetched", FETCH_REMEDY):
        if value.startswith(HUB):
            return _source_in_folder(_fetch_from_hub(value.removeprefix(HUB)), origin, value.rpartition("/")[2])
        return _source_of_tag(value, name.replace("/", "-"), origin)


def local_source(value: str, setting: str = "model.weights") -> Source | None:
    """The weights that a setting names, if they are on this machine. Raises UserError for anything else."""
    origin = f"{setting}={value!r}"
    key = ""
    if not Path(value).expanduser().exists():
        value, _, key = value.partition(SET)
    source = _source_on_this_machine(value, origin, key)
    if source:
        return source
    if not (value.startswith(HUB) or re.fullmatch(r"[\w-]+", value)):
        raise UserError(
            f"{origin}: there is no {Path(value).expanduser()}; give a path that exists, a run, hf-hub:ORG/NAME, or a "
            "tag of open_clip"
        )
    return None


def _source_on_this_machine(value: str, origin: str, key: str) -> Source | None:
    path = Path(value).expanduser()
    run_named = run_folder(value.removeprefix(RUN))
    if value.startswith(RUN):
        if not is_run_or_checkpoint(run_named):
            raise UserError(f"{origin}: there is no run {run_named}")
        return source_in_run(run_named, origin, key)
    if path.is_dir():
        return _source_in_folder(path, origin, path.resolve().name, key)
    if path.is_file():
        return Source(origin, path, _checked_files([path], origin), key=key)
    return source_in_run(run_named, origin, key) if is_run_or_checkpoint(run_named) else None


def source_in_run(folder: Path, origin: str, key: str) -> Source:
    """The weights of a checkpoint. `folder`: the checkpoint, or a run, whose newest one is taken; its best one if the
    key is `best`."""
    if (folder / "checkpoints").is_dir():
        folder = find_checkpoint(folder, "best" if key == "best" else "latest")
        key = key if key != "best" else ""
    with files.damage_to_user_error(f"{origin}: damaged checkpoint", folder, "give another one of the run"):
        trained = ModelConfig.from_values(checkpoint_values(folder)["model_config"])
    return Source(origin, folder, model=trained, key=key)


def _source_in_folder(folder: Path, origin: str, name: str, key: str = "") -> Source:
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        if is_run_or_checkpoint(folder):
            return source_in_run(folder, origin, key)
        raise UserError(f"{origin}: the folder holds {_instead_of_weights(folder)}")
    with to_user_error(f"{origin}: the folder cannot be used", f"; download it again, or give {path} and model="):
        shards = _checked_files(_shards_of(path), origin)
        size = sum(file.stat().st_size for file in shards)
        for file in folder.glob("*.json"):
            if file.stat().st_size > MAX_JSON_BYTES:
                raise ValueError(f"{file.name} is too large to describe a model")
        alone = described_tower(folder)
        if alone and origin.startswith("model.weights="):
            raise UserError(f"{origin} has the {alone} tower alone; give it as model.{alone}.weights=")
        model = described_model(folder, name)
        if model.name:
            comparable(model.architecture)
            if not least_parameters(model.architecture) <= size:
                raise ValueError("it describes a larger model than these weights")
    return Source(origin, path, shards, model, key)


def _instead_of_weights(folder: Path) -> str:
    """The content of a folder without weights, and the remedy, in words."""
    if any((folder / name).is_file() for name in (adapters.CONFIG, *adapters.WEIGHTS)):
        return f"adapters of PEFT alone; merge first: {adapters.MERGE_REMEDY}"
    inner = [path for path in files.folders(folder) if any((path / name).is_file() for name in WEIGHTS)]
    if inner:  # sentence-transformers and diffusers have folders of models in a folder
        return f"no weights itself; give {' or '.join(map(str, inner))}"
    return f"no weights ({', '.join(WEIGHTS)}); give one that does, or a file"


def _shards_of(path: Path) -> list[Path]:
    """A file of weights, or those that an index lists, which lie beside it. Raises ValueError for missing ones."""
    if not path.name.endswith(INDEX):
        return [path]
    names = sorted({*files.read_json(path)["weight_map"].values()})
    plain = r"[\w-][\w.-]*\.(safetensors|bin)"
    wrong = [name for name in names if not (re.fullmatch(plain, name) and (path.parent / name).is_file())]
    if wrong or not names:
        raise ValueError(f"{path.name}: {len(wrong)} of {len(names)} files are missing, as {wrong[:1]}")
    return [path.parent / name for name in names]


def _checked_files(paths: Sequence[Path], origin: str) -> tuple[Path, ...]:
    """Files of weights. Raises UserError for other files, and for those that would run code or fill the memory."""
    for path in paths:
        with path.open("rb") as file:
            start = file.read(16)
        if start.startswith(b"version https://"):
            raise UserError(f"{origin}: {path.name} is a pointer of Git LFS, not the weights; run `git lfs pull` there")
        if path.suffix != ".safetensors" and zipfile.is_zipfile(path):
            with Source(origin, path).unreadable_to_user_error(), zipfile.ZipFile(path) as archive:
                members = archive.infolist()
            if any(re.search(r"/(constants\.pkl|code/.*)$", member.filename) for member in members):
                raise UserError(
                    f"{origin}: {path.name} is a TorchScript archive, a program, which is not run; take OpenAI's "
                    "weights as model=vit-b32-quickgelu model.weights=openai, or its state dict (m.state_dict())"
                )
            if members and all(member.filename.endswith(".npy") for member in members):
                raise UserError(
                    f"{origin}: {path.name} holds arrays of numpy, as big_vision's; take model=siglip-b16 "
                    "model.weights=webli, or save what open_clip.create_model(NAME, pretrained=FILE).state_dict() has"
                )
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise UserError(f"{origin} is compressed, and may fill any memory; load and save it")
    return tuple(paths)


def snapshot(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with announced(f"{name}, which is fetched from the Hub"):
        return Path(snapshot_download(name, allow_patterns=patterns))


def _fetch_from_hub(name: str) -> Path:
    safe = ["*.json", "*.txt", "*.model", "open_clip_model.safetensors", "model*.safetensors"]
    folder = snapshot(name, safe)
    if not any((folder / file).is_file() for file in WEIGHTS):
        folder = snapshot(name, [*safe, "*.bin"])
    return folder


def pretrained_of_tag(tag: str, name: str, origin: str) -> dict[str, object]:
    """open_clip's entry for a tag's weights. Raises UserError for a tag of another model."""
    table = pretrained()
    tags = table.list_pretrained_tags_by_model(name)
    if tag not in tags:
        models = ", ".join(table.list_pretrained_models_by_tag(tag))
        hint = f"it is one of {models}" if models else f"it has {', '.join(tags) or 'none'}"
        raise UserError(
            f"{origin} is not a file, a folder, a run or a tag of model.name={name}{did_you_mean(tag, tags)}; {hint}"
        )
    entry = table.get_pretrained_cfg(name, tag)
    has_quick_gelu = entry.get("quick_gelu", False)
    if has_quick_gelu != model_description(name).get("quick_gelu", False):
        right_name = name.removesuffix("-quickgelu") + ("-quickgelu" if has_quick_gelu else "")
        raise UserError(f"{origin} was trained with another activation; take model.name={right_name}")
    return dict(entry)


def _source_of_tag(tag: str, name: str, origin: str) -> Source:
    import open_clip

    entry = pretrained_of_tag(tag, name, origin)
    with announced(f"{origin}, which is fetched"):
        path = Path(open_clip.download_pretrained(entry))
    return Source(origin, path, (path,), replace(UNKNOWN_MODEL, preprocess=checked_pixels(entry)))
