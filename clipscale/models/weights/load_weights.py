"""Loads weights that `sources.py` has found, of the whole model or of single towers. Files execute no code."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from open_clip.coca_model import CoCa
from open_clip.convert import convert_state_dict
from open_clip.model import CustomTextCLIP
from open_clip.transformer import TextTransformer
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from clipscale.common.errors import UserError, to_user_error
from clipscale.config.model import ModelConfig
from clipscale.models.weights import adapters
from clipscale.models.weights.key_styles import SHARED, choose_weight_set, key_styles, listed, match_names
from clipscale.models.weights.model_settings import with_architecture_of
from clipscale.models.weights.renaming import Weights, from_transformers
from clipscale.models.weights.shapes import naming_mismatch, saved_by_torch, shapes_of
from clipscale.models.weights.sources import SET, Source, find_source

if TYPE_CHECKING:
    from clipscale.checkpoint import CheckpointDescription

log = logging.getLogger(__name__)
# The key of a run's moving average, after `::`.
AVERAGE = "ema"
# The ending of position embeddings' names.
POSITIONS = ("positional_embedding", "pos_embed")
# Names of BERT's first release, which its files still have.
BERT_V1_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
DECODER = "text_decoder."
# Beginnings of the weights after the blocks of CLIP's image tower. A captioner's do not fit: its pooler comes before
# them, and their width is another.
POOLED = ("visual.ln_post.", "visual.proj")
# Beginnings of a captioner's weights that CLIP's towers do not have.
NEW_OF_CAPTIONER = (*POOLED, "visual.attn_pool.", "text.cls_emb", DECODER)
# Weights that a tower of another task may have in addition or may lack: its classifier, our projection.
_TASK_PARTS = re.compile(r"(^|\.)(head|proj|pooler|cls|lm_head|fc|classifier|embeddings\.position_ids)(\.|$)")


def completed_by_weights(config: ModelConfig, resumed: "CheckpointDescription | None" = None) -> ModelConfig:
    """The settings of a model, completed by its weights. Raises UserError.

    If `config` has no name, the weights say the architecture. How pictures are prepared comes from the first of
    these that says it:

    1. `config`,
    2. the checkpoint that a run resumes, if there is one; `resumed` is its description,
    3. the image tower's weights,
    4. the whole model's weights.
    """
    if resumed is not None:
        trained = ModelConfig.from_values(resumed.model_config)
        with_name = config if config.name else replace(config, name=trained.name, architecture=trained.architecture)
        return replace(
            with_name,
            preprocess=trained.preprocess | config.preprocess,
            image_size=config.image_size or trained.image_size,
            context_length=config.context_length or trained.context_length,
            init_bias=trained.init_bias if config.init_bias is None else config.init_bias,
            correct_cls_mask=trained.correct_cls_mask if config.correct_cls_mask is None else config.correct_cls_mask,
        )
    preprocess: dict[str, object] = {}
    correct_mask = True
    if config.weights:
        source = find_source(config.weights, config.name)
        preprocess = source.model.preprocess
        config = with_architecture_of(config, source)
        correct_mask = config.is_captioner and begins_with_correct_mask(source)
    if config.is_captioner and config.correct_cls_mask is None:
        config = replace(config, correct_cls_mask=correct_mask)
    if config.image.weights:
        preprocess = (
            find_source(config.image.weights, config.name, "model.image.weights").model.preprocess or preprocess
        )
    return replace(config, preprocess={**preprocess, **config.preprocess})


def begins_with_correct_mask(source: Source) -> bool:
    """Whether a captioner begins from these weights with the correct mask. Raises UserError.

    A configuration beside the weights may say which mask they were trained with. Otherwise a captioner's weights are
    open_clip's, trained with the other mask. Weights of two towers have no class token yet, so the mask may be correct.
    """
    if source.model.correct_cls_mask is not None:
        return source.model.correct_cls_mask
    if not source.shards:
        return not source.model.is_captioner
    with source.unreadable_to_user_error():
        names = shapes_of(source.shards, source.key, source.setting)
    return not any(DECODER in name for name in names)


def without_weights(config: ModelConfig) -> ModelConfig:
    """The settings of the same model that loads nothing."""
    image = replace(config.image, weights=None)
    return replace(config, weights=None, image=image, text=replace(config.text, weights=None))


def load_weights(encoders: CustomTextCLIP | CoCa, config: ModelConfig) -> None:
    """Load the weights that the settings name: of the whole model, then of each tower. Raises UserError."""
    if config.weights:
        source = find_source(config.weights, config.name)
        copy_into(encoders, convert(read(source), encoders, source), source)
    for tower, prefix, weights in (
        ("image", "visual.", config.image.weights),
        ("text", "text.", config.text.weights),
    ):
        if weights:
            source = find_source(weights, config.name, f"model.{tower}.weights")
            copy_into(encoders, convert(read(source), encoders, source, prefix), source, prefix)


# ---- reading ----


def read(source: Source) -> Weights:
    """The weights in a checkpoint or a file (safetensors, torch.save's), by open_clip's names.

    Raises UserError for a damaged file and for one that would execute code.
    """
    if not source.shards:
        return _load_run(source)
    state: Weights = {}
    other_paths: tuple[str, ...] = ()
    for path in source.shards:
        with source.unreadable_to_user_error():
            content: Mapping[str, object] = (
                load_file(path) if path.suffix == ".safetensors" else saved_by_torch(path, "cpu")
            )
            found_set = choose_weight_set(content, source.key, source.setting)
        state |= cast(Weights, found_set.tensors)
        other_paths += found_set.other_paths
    if other_paths:
        also = listed([f"{SET}{path}" for path in other_paths])
        log.warning(f"{source.setting}: takes the weights {found_set.path or 'at the top'}; others are {also}")
    sparse = [
        name
        for name, weight in state.items()
        if weight.layout != torch.strided or weight.nbytes > weight.untyped_storage().nbytes()
    ]
    if sparse:
        raise UserError(f"{source.setting}: {min(sparse)} takes more memory than the file has; load and save it")
    with source.unreadable_to_user_error():
        scale = adapters.merge_scale(state, source.path.parent, source.setting)
        if scale:
            log.warning(f"{source.setting}: adds its adapters, times {scale:g}, to its weights")
            state = adapters.merge_adapters(state, scale)
    return state


def _load_run(source: Source) -> Weights:
    """A run's weights, or their moving average with the key `ema`."""
    from clipscale import checkpoint  # imported here: it knows the ranks of a run, and models know none

    loaded = checkpoint.load(source.path, entries=("model", source.key))
    state = loaded.model
    if source.key:
        if source.key != AVERAGE or not loaded.ema:
            raise UserError(f"{source.setting}: the run has no {source.key!r}; leave {SET}{source.key} out")
        state |= loaded.ema["weights"]
    elif loaded.ema:
        log.warning(f"{source.setting}: takes the trained weights; their average is {SET}{AVERAGE}")
    state = adapters.merge_run_adapters(state)
    for ours, theirs in (("image.encoder.", "visual."), ("text.encoder.", "text."), ("decoder.", DECODER)):
        state = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: weight
            for name, weight in state.items()
        }
    return state


def convert(state: Weights, encoders: CustomTextCLIP | CoCa, source: Source, prefix: str = "") -> Weights:
    """The weights of a model, or of its tower `prefix`, under the names and in the shapes of `encoders`.

    Raises UserError for weights that none of the model's names has.
    """
    ours = encoders.state_dict()
    state = by_model_names(state, ours, source, prefix)
    with to_user_error(f"{source.setting} does not fit this architecture"):  # conversion fails on unexpected shapes
        state = dict(convert_state_dict(encoders, from_transformers(state)))
    theirs = sorted(state)
    state = {name: value for name, value in state.items() if name.startswith(prefix)}
    if not state.keys() & ours.keys():
        problem = naming_mismatch(min(name for name in ours if name.startswith(prefix)), theirs)
        raise UserError(f"{source.setting} does not fit this architecture: {problem}")
    for name in SHARED:
        if name in state and name in ours and state[name].numel() == 1:
            state[name] = state[name].reshape(ours[name].shape)
    state.pop("text.transformer.embeddings.position_ids", None)
    for name in fit_positions(state, encoders):
        log.warning(f"{source.setting}: {name} resized to {state[name].shape[-2]} positions")
    return state


def by_model_names(state: Weights, ours: Iterable[str], source: Source, prefix: str) -> Weights:
    """The weights under the names of a model (`ours`, or another library's), without the wrappings of the file.

    A warning tells what was taken off the names, and which weights are left over.
    """
    for older, newer in BERT_V1_NAMES.items():
        state = {name.replace(older, newer): value for name, value in state.items()}
    match = match_names(state.keys(), key_styles(ours, prefix), source.setting)
    if match.wrappings or match.unmatched:
        taken_off = f" without {listed(match.wrappings)}" if match.wrappings else ""
        rest = f"; left over: {listed(match.unmatched)}" if match.unmatched else ""
        log.warning(f"{source.setting}: {len(match.matched)} weights by their names{taken_off}{rest}")
    return {match.model_keys[key]: value for key, value in state.items() if key in match.model_keys}


def fit_positions(weights: Weights, model: nn.Module) -> list[str]:
    """Interpolate position embeddings among weights for the model's patches and tokens; returns their names."""
    names = []
    for name, parameter in model.named_parameters():
        if name.endswith(POSITIONS) and name in weights and weights[name].shape != parameter.shape:
            tower = model.get_submodule(name.partition(".")[0])
            encoder = getattr(tower, "encoder", tower)
            class_tokens = int(f"{name.rpartition('.')[0]}.cls_emb" in weights)
            weights[name] = interpolate_positions(weights[name], parameter.shape, encoder, class_tokens)
            names.append(name)
    return names


def interpolate_positions(positions: Tensor, shape: torch.Size, encoder: nn.Module, class_tokens: int) -> Tensor:
    """Position embeddings of patches (bicubic) or tokens (linear) in another number, as open_clip and timm do it.

    positions: (..., T, W). shape: of the result; the same width. Other positions are returned as they are. The
    positions of an image tower's prefix tokens stay, and those of a text tower's last `class_tokens` tokens.
    """
    if positions.ndim != len(shape) or positions.shape[-1] != shape[-1]:
        return positions
    if isinstance(encoder, TextTransformer):
        captions, last = positions.split([len(positions) - class_tokens, class_tokens])
        return torch.cat([F.interpolate(captions.T[None], size=shape[0] - class_tokens, mode="linear")[0].T, last])
    grid: Any = getattr(getattr(encoder, "trunk", None), "patch_embed", encoder)
    if not hasattr(grid, "grid_size"):
        return positions
    height, width = grid.grid_size
    rows = positions.reshape(1, *positions.shape[-2:])
    rows = resample_abs_pos_embed(rows, [height, width], num_prefix_tokens=shape[-2] - height * width)
    return rows.reshape(shape)


# ---- filling ----


def copy_into(encoders: nn.Module, state: Weights, source: Source, prefix: str = "") -> None:
    """Put weights into the model, or the tower whose names begin with `prefix`.

    The bias of the loss, and with `prefix` the parts of a tower of another task, may be missing or left over. Raises
    UserError for other weights that do not fit.
    """
    becomes_captioner = isinstance(encoders, CoCa) and not any(name.startswith(DECODER) for name in state)
    if becomes_captioner:
        state = {name: value for name, value in state.items() if not name.startswith(POOLED)}
    with to_user_error(f"{source.setting} does not fit this architecture"):  # lists the weights of another shape
        missing, left_over = encoders.load_state_dict(state, strict=False)
    problems = []
    missing = [name for name in missing if name.startswith(prefix)]
    if becomes_captioner:
        log.warning(f"{source.setting}: CLIP's towers; new: {', '.join(name.rstrip('.') for name in NEW_OF_CAPTIONER)}")
        missing = [name for name in missing if not name.startswith(NEW_OF_CAPTIONER)]
    for problem, names in (("missing", missing), ("left over", left_over)):
        wrong = [name for name in names if not _may_differ(name, prefix)]
        if wrong:
            problems.append(f"{len(wrong)} {problem}, such as {min(wrong)}")
        elif names:
            log.warning("%s: %s: %s", source.setting, problem, ", ".join(names))
    if problems:
        raise UserError(
            f"{source.setting} does not fit this architecture: the names differ ({'; '.join(problems)}); "
            "rename them as the model's"
        )


def _may_differ(name: str, prefix: str) -> bool:
    """Whether a weight of a model, or of its tower `prefix`, may be missing or left over."""
    return name == "logit_bias" or bool(prefix and _TASK_PARTS.search(name.removeprefix(prefix)))
