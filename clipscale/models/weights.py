"""Finds weights and loads them: open_clip tags and files, Hugging Face folders, clipscale's own runs and exports, single towers.

Names are looked up on the network only where the setting itself is a tag or begins with hf-hub:. Files execute no code.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import open_clip
from huggingface_hub.utils.logging import get_verbosity, set_verbosity, set_verbosity_error
from open_clip.convert import convert_state_dict
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from clipscale import checkpoint
from clipscale.checkpoint.loading import META
from clipscale.common import files
from clipscale.common.errors import UserError, first_line, one_line
from clipscale.common.units import nearest, run_folder
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig, TowerConfig
from clipscale.models import huggingface, pixels, weight_files

log = logging.getLogger(__name__)

HUB = "hf-hub:"
OPEN_CLIP, CONFIG = "open_clip_config.json", "config.json"
_FILES = (
    "open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin", "model.safetensors.index.json"
)  # fmt: skip
"""Weights in a folder, the first that there is."""
_BARE = ("head.", "proj.", "pooler.", "cls.", "lm_head.", "fc.", "classifier.", "embeddings.position_ids")
"""Weights around a tower of another task: its classifier is left out, and our projection keeps its initial values."""


@dataclass(frozen=True)
class Source:
    """Where weights are, and what their folder says of the model."""

    setting: str
    """The setting that asked for them, and its value: the beginning of messages."""
    path: Path
    description: dict[str, Any] = field(default_factory=dict)
    """open_clip's description of the architecture; empty: not known."""
    pixels: dict[str, Any] = field(default_factory=dict)
    """The settings of the model by which its pictures were prepared; empty: not known."""
    quick_gelu: bool | None = None
    own_tokenizer: bool = False
    """Whether the description names the source's own folder as that of the tokenizer, and nothing else."""
    of_run: bool = False
    """Whether it is a checkpoint of clipscale."""


def find(value: str, name: str, setting: str = "model.weights") -> Source:
    """The weights that a setting names; `name` is the architecture, among whose tags it may be. Raises UserError."""
    about, path = f"{setting}={value!r}", Path(value).expanduser()
    if value.startswith(HUB):
        return _in_folder(_from_hub(value.removeprefix(HUB), about), about)
    if path.is_dir():
        return _in_folder(path, about)
    if path.is_file():
        return Source(about, path)
    if (run_folder(value) / "checkpoints").is_dir():
        return _in_folder(run_folder(value), about)
    return _of_tag(value, name.replace("/", "-"), about)


def described(config: ModelConfig) -> ModelConfig:
    """The settings of a model whose weights describe it: architecture, if no name is given, and preparation of pictures.

    Settings that differ from their defaults stay. Raises UserError.
    """
    source = find(config.weights, config.name) if config.weights else None
    if source and not config.name:
        if not source.description:
            raise UserError(
                f"{source.setting} does not describe its architecture; give a preset too, such as model=vit-b32"
            )
        hub = config.hub or source.own_tokenizer
        config = replace(config, name=source.path.parent.name, architecture=source.description, hub=hub)
    source = _of_image(config) or source
    return pixels.filled(config, source.pixels) if source else config


def described_for_training(config: ModelConfig, saved: Mapping[str, Any] | None) -> ModelConfig:
    """The settings of a model that is trained, with the preparation of pictures of its checkpoint `saved`, else that of its weights.

    Never the side of the pictures: a checkpoint does not keep it. Raises UserError for a mean or standard deviation of the settings that
    contradicts it; a setting of the default value counts as unset.
    """
    if saved is not None:
        earlier = typed(ModelConfig, saved["model_config"])
        known, what = {one: getattr(earlier, one) for one in pixels.PIXELS}, "the checkpoint was trained"
    else:
        source = _of_image(config) or (find(config.weights, config.name) if config.weights else None)
        if source is None:
            return config
        known = {key: value for key, value in source.pixels.items() if key in pixels.PIXELS}
        what = f"{source.setting} was trained"
    pixels.check_agreement(config, known, what)
    return pixels.filled(config, known)


def _of_image(config: ModelConfig) -> Source | None:
    """The image tower's own weights, where they say how pictures are prepared."""
    source = find(config.image.weights, config.name, "model.image.weights") if config.image.weights else None
    return source if source and source.pixels else None


def without_weights(config: ModelConfig) -> ModelConfig:
    """The settings of the same model that loads nothing."""
    return replace(config, weights=None, image=TowerConfig(), text=TowerConfig())


def load(encoders: CustomTextCLIP, config: ModelConfig, *, quick_gelu: bool) -> None:
    """Load the weights that the settings name: of the whole model, then of each tower. Raises UserError."""
    if config.weights:
        source = find(config.weights, config.name)
        if source.quick_gelu is not None and source.quick_gelu != quick_gelu and not config.allow_mismatch:
            other = "-quickgelu" if source.quick_gelu else ""
            raise UserError(
                f"{source.setting} was trained with{'' if source.quick_gelu else 'out'} QuickGELU, unlike model.name={config.name}; take "
                f"model.name={config.name.removesuffix('-quickgelu')}{other}"
            )
        fill(encoders, converted(read(source), encoders, source), source, allowed=config.allow_mismatch)
    for tower, part, chosen in (("image", "visual.", config.image), ("text", "text.", config.text)):
        if chosen.weights:
            source = find(chosen.weights, config.name, f"model.{tower}.weights")
            module = encoders.visual if tower == "image" else encoders.text
            state = of_tower(read(source), encoders, part, source)
            fill(encoders, state, source, allowed=config.allow_mismatch, part=part, module=module)


# -- where they are ----------------------------------------------------------------------------------------------------


def _in_folder(folder: Path, about: str) -> Source:
    if (folder / "checkpoints").is_dir():
        folder = checkpoint.locate(folder, "latest")
    if (folder / META).is_file():
        return _own_checkpoint(folder, about)
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{about}: the folder holds no weights ({', '.join(_FILES[:4])}); give an open_clip or Hugging Face folder, a run, or a file"
        )
    try:
        if (folder / OPEN_CLIP).is_file():
            found = files.read_json(folder / OPEN_CLIP)
            made, own = huggingface.with_own_tokenizer(found["model_cfg"], folder)
            return Source(about, path, made, pixels.of_open_clip(found.get("preprocess_cfg") or {}), own_tokenizer=own)
        if not (folder / CONFIG).is_file():
            return Source(about, path)
        found = files.read_json(folder / CONFIG)
        if "architecture" in found:  # timm's
            return Source(about, path, pixels=pixels.of_timm(found.get("pretrained_cfg") or found))
        if found.get("model_type") not in huggingface.KINDS:  # a tower of transformers
            return Source(about, path, pixels=pixels.of_transformers(folder, ""))
        made = huggingface.description(found, str(folder.resolve()))
        prepared = pixels.of_transformers(folder, found["model_type"]) | huggingface.resolution(made)
        return Source(about, path, made, prepared, bool(made.get("quick_gelu")), own_tokenizer=True)
    except Exception as error:  # a value of another type fails wherever it is used
        raise UserError(
            f"{about}: its configuration cannot be used ({one_line(error)}); give model= and the file {path}"
        ) from error


def _own_checkpoint(path: Path, about: str) -> Source:
    """A checkpoint of clipscale. Raises UserError for a damaged one."""
    config = typed(ModelConfig, checkpoint.read_values(path)["model_config"])
    known = {setting: getattr(config, setting) for setting in pixels.PIXELS}
    architecture = config.architecture or open_clip.get_model_config(config.name.replace("/", "-")) or {}
    return Source(about, path, dict(architecture), known, of_run=True)


def _from_hub(name: str, about: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.model", *(file for file in _FILES if file.endswith("safetensors"))]
    with _fetching(about, f"https://huggingface.co/{name}", "its folder"):
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any((folder / file).is_file() for file in _FILES):
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "*.bin"]))
    return folder


def _of_tag(tag: str, name: str, about: str) -> Source:
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag not in tags:
        known = f"; the tags of {name} are {', '.join(tags)}" if tags else ""
        raise UserError(
            f"{about} is no file, no folder, no run and no tag of model.name={name}{nearest(tag, tags)}{known}"
        )
    found = open_clip.get_pretrained_cfg(name, tag)
    place = f"https://huggingface.co/{found['hf_hub'].strip('/')}" if found.get("hf_hub") else found.get("url")
    with _fetching(about, place, "the file"):
        path = Path(open_clip.download_pretrained(found))
    return Source(about, path, pixels=pixels.of_open_clip(found), quick_gelu=bool(found.get("quick_gelu", False)))


@contextmanager
def _fetching(about: str, place: str, what: str) -> Iterator[None]:
    """Report whatever a download leads to in one line, without the hub client's lines for each attempt."""
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    except Exception as error:  # open_clip and the hub client raise what their downloaders do
        raise UserError(
            f"{about} cannot be fetched ({first_line(error)}); download {place} elsewhere, and give {what}"
        ) from error
    finally:
        set_verbosity(before)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(source: Source) -> dict[str, Tensor]:
    """The weights in a file, without the wrappers of trainers. Raises UserError."""
    with _usable(source):
        if source.of_run:
            state = checkpoint.load(source.path, parts=("model",))
            return _of_run(state["model"])
        return weight_files.read(source.path)


@contextmanager
def _usable(source: Source) -> Iterator[None]:
    """Report whatever a damaged or foreign file of weights leads to as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # torch, safetensors, zipfile and numpy have their own
        script = "TorchScript" in str(error)
        why = (
            "is a TorchScript archive; take the tag `openai`, or a safetensors file"
            if script
            else f"is damaged or not a checkpoint ({one_line(error)})"
        )
        raise UserError(f"{source.setting} {why}") from error


def _of_run(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a run's model under open_clip's names."""
    parts = {"image.encoder.": "visual.", "text.encoder.": "text."}
    return {re.sub(r"^(image|text)\.encoder\.", lambda m: parts[m[0]], name): x for name, x in state.items()}


def converted(state: dict[str, Tensor], encoders: CustomTextCLIP, source: Source) -> dict[str, Tensor]:
    """The weights of a whole model under the names and in the shapes of `encoders`."""
    if any(name.startswith(("vision_model.", "text_model.")) for name in state):
        state = huggingface.to_open_clip(state)
    elif "positional_embedding" in state:
        state = convert_to_custom_text_state_dict(state)
    state = dict(convert_state_dict(encoders, state))
    ours = encoders.state_dict()
    for name in ("logit_scale", "logit_bias"):
        if name in state and name in ours and state[name].numel() == 1:
            state[name] = state[name].reshape(ours[name].shape)
    state.pop("text.transformer.embeddings.position_ids", None)
    return resized(state, encoders, source)


def of_tower(state: dict[str, Tensor], encoders: CustomTextCLIP, part: str, source: Source) -> dict[str, Tensor]:
    """One tower's weights, under the names of the whole model: its part of a whole model, or a tower alone."""
    if any(name.startswith(("visual.", "text.", "vision_model.", "text_model.")) for name in state):
        return {name: value for name, value in converted(state, encoders, source).items() if name.startswith(part)}
    tower = encoders.visual if part == "visual." else encoders.text
    inner = "trunk." if hasattr(tower, "trunk") else "transformer." if hasattr(tower, "config") else ""
    ours = tower.state_dict()
    found = {}
    for name, value in state.items():
        # transformers puts the name of the encoder before its weights: bert.encoder..., or nothing.
        candidates = (name, inner + name, inner + name.partition(".")[2])
        match = next((one for one in candidates if one in ours), inner + name)
        found[part + match] = value
    return resized(found, encoders, source)


def resized(state: dict[str, Tensor], encoders: CustomTextCLIP, source: Source) -> dict[str, Tensor]:
    """The weights with position embeddings for another number of patches or tokens interpolated, with a notice."""
    names = ("visual.positional_embedding", "visual.trunk.pos_embed", "text.positional_embedding")
    before, ours = {name: state[name].shape for name in names if name in state}, encoders.state_dict()
    for name, shape in before.items():
        if name not in ours or shape == ours[name].shape or shape[-1] != ours[name].shape[-1]:
            continue
        if name.startswith("text."):
            resize_text_pos_embed(state, encoders)
        elif "trunk" not in name:
            resize_pos_embed(state, encoders)
        else:
            trunk: Any = encoders.visual.trunk
            extra = 0 if getattr(trunk, "no_embed_class", False) else int(getattr(trunk, "num_prefix_tokens", 0))
            grid = list(trunk.patch_embed.grid_size)
            state[name] = resample_abs_pos_embed(state[name], grid, num_prefix_tokens=extra)
    for name, shape in before.items():
        if state[name].shape != shape:
            now = state[name].shape[-2]
            log.warning("%s: %s resized from %s to %s positions", source.setting, name, shape[-2], now)
    return state


# -- filling -----------------------------------------------------------------------------------------------------------


def fill(
    encoders: CustomTextCLIP,
    state: dict[str, Tensor],
    source: Source,
    *,
    allowed: bool,
    part: str = "",
    module: nn.Module | None = None,
) -> None:
    """Put weights into the model, or one of its towers. Raises UserError for those that do not fit, unless `allowed`.

    The logit scale and bias of the loss, and what surrounds a bare tower, may be missing.
    """
    ours = {name: value for name, value in encoders.state_dict().items() if name.startswith(part)}
    shaped = [name for name in ours if name in state and state[name].shape != ours[name].shape]
    missing, left_over = [n for n in ours if n not in state], [n for n in state if n not in ours]
    spare = {n for n in (*missing, *left_over) if n == "logit_bias" or (module and _around(n.removeprefix(part)))}
    problems = {
        "missing": [name for name in missing if name not in spare],
        "left over": [name for name in left_over if name not in spare],
        "of another shape": [f"{n} {list(state[n].shape)}, not {list(ours[n].shape)}" for n in shaped],
    }
    text = "; ".join(f"{what}: {_listed(names, 10 if allowed else 3)}" for what, names in problems.items() if names)
    if (text and not allowed) or len(missing) + len(shaped) == len(ours):
        raise UserError(
            f"{source.setting} does not fit this architecture ({text or 'nothing of it does'}); give the model= that it was trained as, or "
            "model.allow_mismatch=true"
        )
    if text or spare:
        log.warning("%s: %s", source.setting, text or f"not used: {_listed(sorted(spare), 10)}")
    good = {name: value for name, value in state.items() if name in ours and name not in shaped}
    encoders.load_state_dict(good, strict=False)


def _around(name: str) -> bool:
    """Whether a weight is around a bare tower and not in it."""
    return any(name.startswith(one) or f".{one}" in f".{name}" for one in _BARE)


def _listed(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
