"""Finds and loads weights: open_clip's tags, files and folders, clipscale's runs, single towers.

Names are looked up on the network only where the setting itself is a tag or begins with hf-hub:. Files execute no code.
"""

import logging
import re
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from open_clip.convert import convert_state_dict
from open_clip.factory import load_state_dict
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict
from open_clip.transformer import TextTransformer
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from clipscale import checkpoint
from clipscale.checkpoint.loading import META
from clipscale.common import files
from clipscale.common.errors import UserError, first_line, one_line
from clipscale.common.record import Record
from clipscale.common.units import nearest, run_folder
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig, Preprocess
from clipscale.config.setting import settings_of
from clipscale.models.tokenizer import CONFIG as TOKENIZER

log = logging.getLogger(__name__)
Weights = dict[str, Tensor]
"""By name."""

HUB = "hf-hub:"
RUN = "run:"
"""Begins the name or path of a run whose weights are taken. A downloaded folder is none, whatever lies in it."""
OPEN_CLIP, CONFIG = "open_clip_config.json", "config.json"
_FILES = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
"""Weights in a folder, the first that there is."""
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
    description: Record = field(default_factory=dict)
    """open_clip's description of the architecture; empty: not known."""
    pixels: Record = field(default_factory=dict)
    """The settings of the model by which its pictures were prepared; empty: not known."""
    quick_gelu: bool | None = None


def find(value: str, name: str, setting: str = "model.weights") -> Source:
    """The weights that a setting names; `name` is the architecture, among whose tags it may be. Raises UserError."""
    origin = f"{setting}={value!r}"
    if value.startswith(RUN):
        return _in_run(run_folder(value.removeprefix(RUN)), origin)
    path = Path(value).expanduser()
    if path.is_dir():
        return _in_folder(path, origin)
    if path.is_file():
        return Source(origin, path)
    if is_run(run_folder(value)):
        raise UserError(f"{origin} is a run; say so, {setting}={RUN}{value}")
    try:
        if value.startswith(HUB):
            return _in_folder(_from_hub(value.removeprefix(HUB)), origin)
        return _of_tag(value, name.replace("/", "-"), origin)
    except UserError:
        raise
    except Exception as error:  # open_clip and the hub client raise what their downloaders do
        raise UserError(f"{origin} cannot be fetched ({first_line(error)}); download it elsewhere, give it") from error


def described(config: ModelConfig, saved: Record | None = None) -> ModelConfig:
    """The settings of a model with what its weights say of its pictures and, if no name is given, its architecture.

    Pictures are prepared as in the run's own checkpoint `saved`, else as the image tower's weights say, else as the
    whole model's. What the settings say stays. Raises UserError.
    """
    if saved is not None:
        trained = typed(ModelConfig, saved["model_config"])
        return replace(
            config,
            preprocess=trained.preprocess | config.preprocess,
            image_size=config.image_size or trained.image_size,
            context_length=config.context_length or trained.context_length,
        )
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
    image = replace(config.image, weights=None)
    return replace(config, weights=None, image=image, text=replace(config.text, weights=None))


def load(encoders: CustomTextCLIP, config: ModelConfig, *, quick_gelu: bool) -> None:
    """Load the weights that the settings name: of the whole model, then of each tower. Raises UserError."""
    if config.weights:
        source = find(config.weights, config.name)
        if source.quick_gelu is not None and source.quick_gelu != quick_gelu:
            right = config.name.removesuffix("-quickgelu") + ("-quickgelu" if source.quick_gelu else "")
            raise UserError(f"{source.setting} was trained with another activation; take model.name={right}")
        fill(encoders, converted(read(source), encoders, source), source)
    for setting, part, weights in (("image", "visual.", config.image.weights), ("text", "text.", config.text.weights)):
        if weights:
            source = find(weights, config.name, f"model.{setting}.weights")
            fill(encoders, of_tower(read(source), encoders, part, source), source, part)


# -- where they are ----------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, or one of its checkpoints."""
    return (folder / "checkpoints").is_dir() or (folder / META).is_file()


def _in_run(folder: Path, origin: str) -> Source:
    """The weights of a run's newest checkpoint, or of this one."""
    if not is_run(folder):
        raise UserError(f"{origin}: there is no run {folder}")
    return _in_checkpoint(checkpoint.locate(folder, "latest") if (folder / "checkpoints").is_dir() else folder, origin)


def _in_folder(folder: Path, origin: str) -> Source:
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        if is_run(folder):
            raise UserError(f"{origin} is a run; say so, {RUN}{folder}")
        raise UserError(f"{origin}: the folder holds no weights ({', '.join(_FILES)}); give one that does, or a file")
    try:
        return _beside(folder, Source(origin, path))
    except UserError:
        raise
    except Exception as error:  # a value of another type fails wherever it is used
        raise UserError(f"{origin}: its configuration cannot be used ({one_line(error)}); give {path}") from error


def _in_checkpoint(folder: Path, origin: str) -> Source:
    config = typed(ModelConfig, checkpoint.read_values(folder)["model_config"])
    if config.lora:
        raise UserError(f"{origin}: a checkpoint of adapters alone; give the folder of `clipscale export run=...`")
    description = config.architecture or open_clip.get_model_config(config.name.replace("/", "-"))
    if config.context_length:
        description["text_cfg"]["context_length"] = config.context_length
    return Source(origin, folder, description, config.preprocess)


def _beside(folder: Path, source: Source) -> Source:
    """The weights with what open_clip's or timm's configuration beside them says."""
    if (folder / OPEN_CLIP).is_file():
        content = files.read_json(folder / OPEN_CLIP)
        check_names(content["model_cfg"])
        text = content["model_cfg"]["text_cfg"]
        # Its tokenizer is the folder that it came with, if the files are there, as in open_clip.
        if "hf_tokenizer_name" in text and not text.get("hf_model_name") and (folder / TOKENIZER).is_file():
            text["hf_tokenizer_name"] = str(folder.resolve())
        pixels = checked_pixels(content.get("preprocess_cfg") or {})
        return replace(source, description=content["model_cfg"], pixels=pixels)
    if not (folder / CONFIG).is_file():
        return source
    content = files.read_json(folder / CONFIG)
    if "architecture" in content:  # a tower of timm
        prepared = content.get("pretrained_cfg") or content
        pixels = checked_pixels({key: prepared[key] for key in ("mean", "std") if key in prepared})
        return replace(source, pixels=pixels)
    if content.get("model_type") == "clip":
        raise UserError(
            f"{source.setting}: a CLIP model of transformers; docs/howto/hugging_face.py makes an open_clip folder"
        )
    return source


def check_names(description: Record) -> None:
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


def _of_tag(tag: str, name: str, origin: str) -> Source:
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag not in tags:
        known = f"; the tags of {name} are {', '.join(tags)}" if tags else ""
        raise UserError(
            f"{origin} is no file, no folder, no run and no tag of model.name={name}{nearest(tag, tags)}{known}"
        )
    pretrained = open_clip.get_pretrained_cfg(name, tag)
    path = Path(open_clip.download_pretrained(pretrained))
    return Source(origin, path, pixels=checked_pixels(pretrained), quick_gelu=pretrained.get("quick_gelu", False))


# -- how their pictures are prepared -----------------------------------------------------------------------------------


def checked_pixels(values: Record) -> Record:
    """Of these values those of `model.preprocess`, with their types. Raises UserError."""
    names = settings_of(Preprocess)
    known = {key: value for key, value in values.items() if key in names}
    checked = asdict(typed(Preprocess, known))
    return {key: checked[key] for key in known}


# -- reading -----------------------------------------------------------------------------------------------------------


def read(source: Source) -> Weights:
    """The weights in a checkpoint or a file (safetensors, torch.save's), by open_clip's names.

    Raises UserError for a damaged file and for one that would execute code.
    """
    path = source.path
    if path.is_dir():
        state = checkpoint.load(path, parts=("model",))["model"]
        return {re.sub(r"^text\.encoder", "text", re.sub(r"^image\.encoder", "visual", n)): x for n, x in state.items()}
    if path.suffix != ".safetensors" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise UserError(f"{source.setting} is compressed, and may fill any memory; load and save it")
    try:
        state = load_state_dict(str(path), weights_only=True)
    except Exception as error:  # torch, safetensors, zipfile and pickle have their own
        raise UserError(f"{source.setting} is damaged or no file of weights ({one_line(error)})") from error
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def converted(state: Weights, encoders: CustomTextCLIP, source: Source) -> Weights:
    """The weights of a whole model under the names and in the shapes of `encoders`."""
    if "positional_embedding" in state:
        state = convert_to_custom_text_state_dict(state)
    state = dict(convert_state_dict(encoders, state))
    ours = encoders.state_dict()
    for name in ("logit_scale", "logit_bias"):
        if name in state and name in ours and state[name].numel() == 1:
            state[name] = state[name].reshape(ours[name].shape)
    state.pop("text.transformer.embeddings.position_ids", None)
    return resized(state, encoders, source)


def of_tower(state: Weights, encoders: CustomTextCLIP, part: str, source: Source) -> Weights:
    """One tower's weights, under the names of the whole model: its part of a whole model, or a tower alone."""
    if any(name.startswith(("visual.", "text.")) for name in state):
        return {name: value for name, value in converted(state, encoders, source).items() if name.startswith(part)}
    tower = encoders.visual if part == "visual." else encoders.text
    inner = ""
    if hasattr(tower, "trunk"):
        inner = "trunk."
    elif hasattr(tower, "config"):
        inner = "transformer."
    ours = tower.state_dict()
    named = {part + (name if name in ours else inner + name): value for name, value in state.items()}
    return resized(named, encoders, source)


def resized(state: Weights, encoders: CustomTextCLIP, source: Source) -> Weights:
    """The weights with position embeddings for another number of patches or tokens interpolated, with a notice."""
    ours = encoders.state_dict()
    for name in ("visual.positional_embedding", "visual.trunk.pos_embed", "text.positional_embedding"):
        before = state.get(name)
        if before is not None and name in ours and before.shape != ours[name].shape:
            encoder = encoders.text if name.startswith("text.") else encoders.visual
            after = ours[name].shape
            state[name] = interpolated(before, after, encoder)
            log.warning(f"{source.setting}: {name} resized from {before.shape[-2]} to {after[-2]} positions")
    return state


def interpolated(positions: Tensor, shape: torch.Size, encoder: nn.Module) -> Tensor:
    """Position embeddings of patches (bicubic) or tokens (linear) in another number, as by open_clip and timm.

    positions: (..., T, W). shape: of the result; the same width. Other positions are returned as they are.
    """
    if positions.ndim != len(shape) or positions.shape[-1] != shape[-1]:
        return positions
    if isinstance(encoder, TextTransformer):
        return F.interpolate(positions.T[None], size=shape[0], mode="linear")[0].T
    grid: Any = getattr(getattr(encoder, "trunk", None), "patch_embed", encoder)
    if not hasattr(grid, "grid_size"):
        return positions
    height, width = grid.grid_size
    rows = positions.reshape(1, *positions.shape[-2:])
    rows = resample_abs_pos_embed(rows, [height, width], num_prefix_tokens=shape[-2] - height * width)
    return rows.reshape(shape)


# -- filling -----------------------------------------------------------------------------------------------------------


def fill(encoders: nn.Module, state: Weights, source: Source, part: str = "") -> None:
    """Put weights into the model, or the tower whose names begin with `part`.

    The bias of the loss, and what surrounds a bare tower, may be missing or left over. Raises UserError for other
    weights that do not fit.
    """
    try:
        missing, left_over = encoders.load_state_dict(state, strict=False)
    except RuntimeError as error:  # lists the weights of another shape
        raise UserError(f"{source.setting} does not fit this architecture: {one_line(error)}") from error
    problems = []
    missing = [name for name in missing if name.startswith(part)]
    for what, names in (("missing", missing), ("left over", left_over)):
        wrong = [name for name in names if not _may_differ(name, part)]
        if wrong:
            problems.append(f"{len(wrong)} {what}, such as {min(wrong)}")
        elif names:
            log.warning("%s: %s: %s", source.setting, what, ", ".join(names))
    if problems:
        raise UserError(f"{source.setting} does not fit this architecture ({'; '.join(problems)}); give another model=")


def _may_differ(name: str, part: str) -> bool:
    """Whether a weight of a model, or of its tower `part`, may be missing or left over."""
    return name == "logit_bias" or bool(part and _BARE.search(name.removeprefix(part)))
