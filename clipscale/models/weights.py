"""Finds and loads weights: open_clip's tags and files, Hugging Face's folders, clipscale's runs, single towers.

Names are looked up on the network only where the setting itself is a tag or begins with hf-hub:. Files execute no code.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.convert import convert_state_dict
from open_clip.factory import load_state_dict
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from clipscale import checkpoint
from clipscale.checkpoint.loading import META
from clipscale.common.errors import UserError, first_line, one_line
from clipscale.common.units import nearest, run_folder
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig, Preprocess
from clipscale.models import huggingface

log = logging.getLogger(__name__)

HUB = "hf-hub:"
OPEN_CLIP, CONFIG = "open_clip_config.json", "config.json"
_FILES = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
"""Weights in a folder, the first that there is."""
KEPT = 20
"""Text positions that stay where a context is stretched."""
_BARE = re.compile(r"(^|\.)(head|proj|pooler|cls|lm_head|fc|classifier|embeddings\.position_ids)(\.|$)")
"""Weights around a tower of another task: its classifier is left out, and our projection keeps its initial values."""
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""What a text in a stranger's description may be: one of open_clip's words, or a repository. No path and no address."""


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
    stretch: bool = True
    """Whether a longer context is made as in Long-CLIP, or all positions are interpolated."""


def find(value: str, name: str, setting: str = "model.weights") -> Source:
    """The weights that a setting names; `name` is the architecture, among whose tags it may be. Raises UserError."""
    about, path = f"{setting}={value!r}", Path(value).expanduser()
    if path.is_dir():
        return _in_folder(path, about)
    if path.is_file():
        return Source(about, path)
    if (run_folder(value) / "checkpoints").is_dir():
        return _in_folder(run_folder(value), about)
    try:
        if value.startswith(HUB):
            return _in_folder(_from_hub(value.removeprefix(HUB)), about)
        return _of_tag(value, name.replace("/", "-"), about)
    except UserError:
        raise
    except Exception as error:  # open_clip and the hub client raise what their downloaders do
        raise UserError(f"{about} cannot be fetched ({first_line(error)}); download it elsewhere, give it") from error


def described(config: ModelConfig, saved: Mapping[str, Any] | None = None) -> ModelConfig:
    """The settings of a model with what its weights say of its pictures and, if no name is given, its architecture.

    Pictures are prepared as in the run's own checkpoint `saved`, else as the image tower's weights say, else as the
    whole model's. What the settings say stays. Raises UserError.
    """
    if saved is not None:
        trained = typed(ModelConfig, saved["model_config"])
        sizes = {key: getattr(config, key) or getattr(trained, key) for key in ("image_size", "context_length")}
        return replace(config, preprocess=trained.preprocess | config.preprocess, **sizes)
    source = find(config.weights, config.name) if config.weights else None
    if source and not config.name:
        if not source.description:
            raise UserError(f"{source.setting} does not describe its architecture; give a preset too, as model=vit-b32")
        config = replace(config, name=source.path.parent.name, architecture=source.description)
    known = source.pixels if source else {}
    if config.image.weights:
        known = find(config.image.weights, config.name, "model.image.weights").pixels or known
    return replace(config, preprocess={**known, **config.preprocess})


def without_weights(config: ModelConfig) -> ModelConfig:
    """The settings of the same model that loads nothing."""
    image, text = (replace(tower, weights=None) for tower in (config.image, config.text))
    return replace(config, weights=None, image=image, text=text)


def load(encoders: CustomTextCLIP, config: ModelConfig, *, quick_gelu: bool) -> None:
    """Load the weights that the settings name: of the whole model, then of each tower. Raises UserError."""
    if config.weights:
        source = find(config.weights, config.name)
        if source.quick_gelu is not None and source.quick_gelu != quick_gelu:
            right = config.name.removesuffix("-quickgelu") + ("-quickgelu" if source.quick_gelu else "")
            raise UserError(f"{source.setting} was trained with another activation; take model.name={right}")
        fill(encoders, converted(read(source), encoders, source), source)
    for tower, part, weights in (("image", "visual.", config.image.weights), ("text", "text.", config.text.weights)):
        if weights:
            source = find(weights, config.name, f"model.{tower}.weights")
            fill(encoders, of_tower(read(source), encoders, part, source), source, part)


# -- where they are ----------------------------------------------------------------------------------------------------


def _in_folder(folder: Path, about: str) -> Source:
    if (folder / "checkpoints").is_dir():
        folder = checkpoint.locate(folder, "latest")
    if (folder / META).is_file():
        config = typed(ModelConfig, checkpoint.read_values(folder)["model_config"])
        if config.lora:
            raise UserError(f"{about}: a checkpoint of adapters alone; give the folder of `clipscale export run=...`")
        description = config.architecture or open_clip.get_model_config(config.name.replace("/", "-"))
        if config.context_length:
            description["text_cfg"]["context_length"] = config.context_length
        return Source(about, folder, description, config.preprocess)
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{about}: the folder holds no weights ({', '.join(_FILES)}); give one that does, or a file")
    try:
        if (folder / OPEN_CLIP).is_file():
            content = json.loads((folder / OPEN_CLIP).read_text(encoding="utf-8"))
            check_names(content["model_cfg"])
            description = huggingface.with_own_tokenizer(content["model_cfg"], folder)
            return Source(about, path, description, pixels_of_open_clip(content.get("preprocess_cfg") or {}))
        if not (folder / CONFIG).is_file():
            return Source(about, path)
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if "architecture" in content:  # a tower of timm
            prepared = {k: v for k, v in (content.get("pretrained_cfg") or content).items() if k in ("mean", "std")}
            return Source(about, path, pixels=checked_pixels(prepared))
        kind = content.get("model_type")
        if kind not in huggingface.KINDS:  # a tower of transformers
            return Source(about, path, pixels=pixels_of_transformers(folder, ""))
        description = huggingface.description(content, str(folder.resolve()))
        prepared = pixels_of_transformers(folder, kind) | huggingface.resolution(description)
        return Source(about, path, description, prepared, bool(description.get("quick_gelu")))
    except Exception as error:  # a value of another type fails wherever it is used
        raise UserError(f"{about}: its configuration cannot be used ({one_line(error)}); give {path}") from error


def check_names(description: dict[str, Any]) -> None:
    """Raise ValueError for an open_clip description with a text that could be a path or an address."""
    for key, value in description.items():
        if isinstance(value, dict):
            check_names(value)
        elif isinstance(value, str) and value and not _NAME.fullmatch(value):
            raise ValueError(f"{key}={value[:80]!r} is no name")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    safe = ["*.json", "*.txt", "*.model", "open_clip_model.safetensors", "model*.safetensors"]
    folder = Path(snapshot_download(name, allow_patterns=safe))
    if not any((folder / file).is_file() for file in _FILES):
        folder = Path(snapshot_download(name, allow_patterns=[*safe, "*.bin"]))
    return folder


def _of_tag(tag: str, name: str, about: str) -> Source:
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag not in tags:
        known = f"; the tags of {name} are {', '.join(tags)}" if tags else ""
        near = nearest(tag, tags)
        raise UserError(f"{about} is no file, no folder, no run and no tag of model.name={name}{near}{known}")
    pretrained = open_clip.get_pretrained_cfg(name, tag)
    path = Path(open_clip.download_pretrained(pretrained))
    return Source(about, path, pixels=pixels_of_open_clip(pretrained), quick_gelu=pretrained.get("quick_gelu", False))


# -- how their pictures are prepared -----------------------------------------------------------------------------------


def pixels_of_open_clip(preprocess: dict[str, Any]) -> dict[str, Any]:
    """open_clip's description as settings. Raises UserError for values that they cannot have."""
    return checked_pixels(preprocess)


def pixels_of_transformers(folder: Path, kind: str) -> dict[str, Any]:
    """transformers' in a folder, as settings. `kind`: clip or siglip; "": a tower alone, of mean and deviation."""
    file = folder / "preprocessor_config.json"
    processor = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    processor = processor.get("image_processor", processor)
    values: dict[str, Any] = {}
    if kind:
        interpolation = "bilinear" if processor.get("resample") == 2 else "bicubic"
        values = {"resize_mode": "squash" if kind == "siglip" else "shortest", "interpolation": interpolation}
    for name, key in (("image_mean", "mean"), ("image_std", "std")):
        if name in processor or kind == "siglip":
            values[key] = tuple(processor.get(name) or (0.5, 0.5, 0.5))
    return checked_pixels(values)


def checked_pixels(values: dict[str, Any]) -> dict[str, Any]:
    """Of these values those of `model.preprocess`, with their types. Raises UserError."""
    names = {part.name for part in fields(Preprocess)}
    known = {key: value for key, value in values.items() if key in names}
    settings = asdict(typed(Preprocess, known))
    return {key: settings[key] for key in known}


# -- reading -----------------------------------------------------------------------------------------------------------


def read(source: Source) -> dict[str, Tensor]:
    """The weights in a checkpoint or a file (safetensors, torch.save's), by open_clip's names.

    Raises UserError for a damaged file and for one that would execute code.
    """
    path = source.path
    if path.is_dir():
        state = checkpoint.load(path, parts=("model",))["model"]
        towers = {"image.encoder.": "visual.", "text.encoder.": "text."}
        return {re.sub(r"^(image|text)\.encoder\.", lambda m: towers[m[0]], name): x for name, x in state.items()}
    try:
        state = load_state_dict(str(path), weights_only=True)
    except Exception as error:  # torch, safetensors, zipfile and pickle have their own
        raise UserError(f"{source.setting} is damaged or no file of weights ({one_line(error)})") from error
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


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
    named = {part + (name if name in ours else inner + name): value for name, value in state.items()}
    return resized(named, encoders, source)


def resized(state: dict[str, Tensor], encoders: CustomTextCLIP, source: Source) -> dict[str, Tensor]:
    """The weights with position embeddings for another number of patches or tokens interpolated, with a notice."""
    names = ("visual.positional_embedding", "visual.trunk.pos_embed", "text.positional_embedding")
    before, ours = {name: state[name].shape for name in names if name in state}, encoders.state_dict()
    for name, shape in before.items():
        if name not in ours or shape == ours[name].shape or shape[-1] != ours[name].shape[-1]:
            continue
        if name.startswith("text.") and source.stretch and KEPT < shape[0] < len(ours[name]):
            state[name] = stretched(state[name], len(ours[name]))
        elif name.startswith("text."):
            resize_text_pos_embed(state, encoders)
        elif "trunk" not in name:
            resize_pos_embed(state, encoders)
        else:
            trunk: Any = encoders.visual.trunk
            prefix = 0 if getattr(trunk, "no_embed_class", False) else trunk.num_prefix_tokens
            grid = list(trunk.patch_embed.grid_size)
            state[name] = resample_abs_pos_embed(state[name], grid, num_prefix_tokens=prefix)
        now = state[name].shape[-2]
        log.warning("%s: %s resized from %s to %s positions", source.setting, name, shape[-2], now)
    return state


def stretched(positions: Tensor, length: int) -> Tensor:
    """Position embeddings (T, W) for a longer context (length, W), as in Long-CLIP (arXiv 2403.15378).

    The first 20, which most captions fill, stay. Those after them are interpolated linearly: position 20 + j lies at
    20 + j (T - 20) / (length - 20) of the old ones, beyond the last on the line through the last two. 77 become 248.
    """
    old = len(positions)
    place = KEPT + torch.arange(length - KEPT, device=positions.device) * ((old - KEPT) / (length - KEPT))
    left = place.long().clamp(max=old - 2)
    share = (place - left)[:, None].to(positions.dtype)
    return torch.cat([positions[:KEPT], positions[left].lerp(positions[left + 1], share)])


# -- filling -----------------------------------------------------------------------------------------------------------


def fill(encoders: nn.Module, state: dict[str, Tensor], source: Source, part: str = "") -> None:
    """Put weights into the model, or the tower whose names begin with `part`.

    The bias of the loss, and what surrounds a bare tower, may be missing or left over. Raises UserError for other
    weights that do not fit.
    """
    try:
        missing, left_over = encoders.load_state_dict(state, strict=False)
    except RuntimeError as error:  # lists the weights of another shape
        raise UserError(f"{source.setting} does not fit this architecture: {one_line(error)}") from error
    problems = []
    for what, names in (("missing", [name for name in missing if name.startswith(part)]), ("left over", left_over)):
        spare = [name for name in names if name == "logit_bias" or (part and _BARE.search(name.removeprefix(part)))]
        if spare:
            log.warning("%s: %s: %s", source.setting, what, ", ".join(spare))
        if wrong := sorted(set(names) - set(spare)):
            problems.append(f"{len(wrong)} {what}, such as {wrong[0]}")
    if problems:
        raise UserError(f"{source.setting} does not fit this architecture ({'; '.join(problems)}); give another model=")
