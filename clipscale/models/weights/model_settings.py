"""Completes the settings of a model with what its weights describe, and checks that the weights fit it.

Imports nothing heavy but for a repository or a file of torch.save, as `sources.py`.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError, to_user_error
from clipscale.config.libraries import pretrained
from clipscale.config.model import ModelConfig
from clipscale.models.weights.descriptions import COMPARED, comparable, described_model, difference
from clipscale.models.weights.key_styles import TEXT, TOWERS, VISUAL, key_styles, known_names, match_names, tower_alone
from clipscale.models.weights.shapes import mismatch_message, shapes_of
from clipscale.models.weights.sources import (
    FETCH_REMEDY,
    HUB,
    SET,
    Source,
    local_source,
    pretrained_of_tag,
    snapshot,
    source_in_run,
)
from clipscale.run_folder.records import settings_of_run

# The key of a description that makes open_clip give the model a logit bias, which begins at its value.
INIT_BIAS = "init_logit_bias"
# Section of a description -> the beginning of its tower's names of weights.
PREFIXES = {"vision_cfg": VISUAL, "text_cfg": TEXT}


def resolve_architecture(
    config: ModelConfig, *, chosen: bool, needs_bias: bool = False, resumed: Path | None = None
) -> ModelConfig:
    """The settings of a model, with the architecture that its weights describe if they are on this machine.

    `chosen`: the user has also chosen a model, which has to be the weights' own. Otherwise the settings have a default
    model, or an experiment's, and the weights' model replaces it. But a captioner stays, and begins from the weights'
    two towers. `needs_bias`: take the weights' logit bias, too, if they have one. `resumed`: the folder of the run that
    goes on, if one does. Its checkpoint holds all weights, so where these were, there may be others or none. Raises
    UserError.
    """
    if resumed:
        by_weights = config.weights and not (chosen or pretrained().list_pretrained_models_by_tag(config.weights))
        return with_trained_architecture(config, resumed) if by_weights else config
    if config.weights:
        source = local_source(config.weights)
        names_its_model = config.weights.startswith(HUB) or bool(source and source.model.name)
        adds_captioner = config.is_captioner and not (source and source.model.is_captioner)
        if names_its_model and not chosen and not adds_captioner:
            config = replace(config, name="", architecture={})
        if source:
            config = with_architecture_of(config, source)
            if needs_bias:
                config = with_logit_bias_of(config, source)
    towers = (("image", "vision_cfg", config.image.weights), ("text", "text_cfg", config.text.weights))
    for tower, section, weights in towers:
        setting = f"model.{tower}.weights"
        source = local_source(weights, setting) if weights else None
        if source:
            _check_fit(config, source, section)
    return config


def with_trained_architecture(config: ModelConfig, run_dir: Path) -> ModelConfig:
    """The settings with the architecture of a run that has checkpoints. Raises UserError where it cannot be read.

    config.yaml has the whole run's: a checkpoint's pictures may have the size of its stage.
    """
    trained = None
    with suppress(UserError, *files.DAMAGED_OR_FOREIGN):
        trained = ModelConfig.from_values(settings_of_run(run_dir)["model"])
    other = trained or source_in_run(run_dir, f"run={run_dir}", "").model
    return replace(
        _with_architecture(config, other), init_bias=other.init_bias if config.init_bias is None else config.init_bias
    )


def check_tags(config: ModelConfig) -> None:
    """Raise UserError for tags of another model."""
    for setting, weights in config.weight_settings:
        if config.name and not weights.startswith(HUB) and not local_source(weights, setting):
            pretrained_of_tag(weights, config.name.replace("/", "-"), f"{setting}={weights!r}")


def with_checkpoints_of_runs(config: ModelConfig) -> ModelConfig:
    """The settings with a checkpoint's path for each run that they name, whose newest one may soon be another.

    Raises UserError.
    """

    def found(weights: str | None, setting: str) -> str | None:
        source = local_source(weights, setting) if weights else None
        if source is None or source.shards:
            return weights
        return SET.join(filter(None, (str(source.path), source.key)))

    return replace(
        config,
        weights=found(config.weights, "model.weights"),
        image=replace(config.image, weights=found(config.image.weights, "model.image.weights")),
        text=replace(config.text, weights=found(config.text.weights, "model.text.weights")),
    )


def with_architecture_of(config: ModelConfig, source: Source) -> ModelConfig:
    """The settings with the architecture of the weights if they name none. Raises UserError for another one."""
    theirs = source.model
    if config.name:
        if not theirs.name:
            _check_fit(config, source, *COMPARED)
            return config
        differs = difference(config, theirs)
        if differs:
            adds_captioner = config.is_captioner and not theirs.is_captioner
            remedy = "give a captioner of its sizes with model=" if adds_captioner else "leave model= out"
            raise UserError(f"model.name={config.name}: {source.setting} is {theirs.name}, {differs}; {remedy}")
        return config
    if not theirs.name:
        raise UserError(f"{source.setting} does not describe its architecture; give a preset too, as model=vit-b32")
    return _with_architecture(config, theirs)


def _with_architecture(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """The settings with another model's architecture, and with its sizes where they have none."""
    return replace(
        config,
        name=other.name,
        architecture=other.architecture,
        image_size=config.image_size or other.image_size,
        context_length=config.context_length or other.context_length,
    )


def with_logit_bias_of(config: ModelConfig, source: Source) -> ModelConfig:
    """The settings of a model that has a logit bias if the weights have one. Raises UserError.

    The weights' own value replaces the initial one.
    """
    if config.init_bias is not None or INIT_BIAS in config.description:
        return config
    theirs = source.model
    bias = theirs.description.get(INIT_BIAS) if theirs.init_bias is None else theirs.init_bias
    if bias is None and source.shards:
        with source.unreadable_to_user_error():
            names = shapes_of(source.shards, source.key, source.setting)
        bias = 0.0 if any(name.endswith("logit_bias") for name in names) else None
    return replace(config, init_bias=bias)


def with_hub_architecture(config: ModelConfig) -> ModelConfig:
    """The settings with the architecture of a repository's weights, which are not fetched. Raises UserError."""
    value = config.weights or ""
    if config.name or not value.startswith(HUB):
        return config
    origin = f"model.weights={value!r}"
    with to_user_error(f"{origin} cannot be fetched", FETCH_REMEDY):
        folder = snapshot(value.removeprefix(HUB), ["*.json"])
        return with_architecture_of(
            config, Source(origin, folder, model=described_model(folder, value.rpartition("/")[2]))
        )


def _check_fit(config: ModelConfig, source: Source, *sections: str) -> None:
    """Raise UserError for files of weights that are damaged, or of other towers than these of the model."""
    description = config.description
    with source.unreadable_to_user_error():
        shapes = shapes_of(source.shards, source.key, source.setting)
    if not ({"embed_dim", *COMPARED} <= description.keys() and shapes):
        return
    prefix = PREFIXES[sections[0]] if len(sections) == 1 else ""
    match = match_names(shapes, key_styles(known_names(), prefix), source.setting)
    ours = {match.model_keys[key]: shape for key, shape in shapes.items() if key in match.model_keys}
    tower = tower_alone(shapes, source.setting)
    wrong = ""
    if tower and tower != prefix:
        wrong = f"it has the {TOWERS[tower]} tower alone; give it as model.{TOWERS[tower]}.weights="
    elif match.matched:  # without a match, open_clip may know the names
        if config.is_captioner:
            ours.pop("visual.proj", None)  # CLIP's projection has another width
        wrong = mismatch_message(ours, comparable(description), sections, match.unmatched)
    if wrong:
        raise UserError(f"{source.setting} does not fit model.name={config.name}: {wrong}")
