"""Finds weights: tags of open_clip, files, folders of open_clip and transformers, runs. Reads what they say of a model.

Imports nothing heavy but for a repository or a file of torch.save: a mistake is reported at once.

Names are looked up on the network only where the setting itself is a tag or begins with hf-hub:. Folders are untrusted:
their files may name no path and no address, and describe no model larger than the weights.
"""

import re
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from clipscale.common import files
from clipscale.common.checkpoints import META, is_run, locate
from clipscale.common.errors import UserError, library
from clipscale.common.record import Record
from clipscale.common.units import nearest, run_folder
from clipscale.config.libraries import model_description, pretrained
from clipscale.config.parse import dataclass_from
from clipscale.config.sections import ModelConfig, Preprocess
from clipscale.config.setting import settings_of
from clipscale.models import adapters, hugging_face
from clipscale.models.names import TEXT, TOWERS, VISUAL, known_names, matched, namings, tower_alone
from clipscale.models.shapes import misfit, shapes_of

HUB = "hf-hub:"
# Separates a path from the key of a set of weights in it.
SET = "::"
# May begin the name or path of a run; needed where a folder has weights of its own, too.
RUN = "run:"
OPEN_CLIP, CONFIG, INDEX = "open_clip_config.json", "config.json", ".index.json"
# Names of weights in a folder. The first that exists is taken.
WEIGHTS = ("open_clip_model.safetensors", "model.safetensors", "model.safetensors.index.json",
           "open_clip_pytorch_model.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")  # fmt: skip
MAX_JSON_BYTES = 2**26
FETCH_REMEDY = "; download it elsewhere, give it"
UNKNOWN_MODEL = ModelConfig("")
PARTS = {"vision_cfg": VISUAL, "text_cfg": TEXT}
COMPARED: Record = files.read_yaml(Path(__file__).with_name("open_clip.yaml"))
# What a text in a stranger's description may be: one of open_clip's words, or a repository. No path and no address.
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Where weights are, and what lies beside them says of the model."""

    # The setting that asked for them, and its value: the beginning of messages.
    setting: str
    # A file, a run's checkpoint, or a folder.
    path: Path
    # The files; none of a checkpoint.
    shards: tuple[Path, ...] = ()
    # What lies beside the weights says of the model. Without a name the architecture is not known.
    model: ModelConfig = UNKNOWN_MODEL
    # Which of several sets of weights; empty: the usual one.
    key: str = ""

    def reading(self) -> AbstractContextManager[None]:
        """Around what reads the files. Raises UserError for damaged ones."""
        return library(f"{self.setting} cannot be read as weights")


def find(value: str, name: str, setting: str = "model.weights") -> Source:
    """The weights that a setting names; `name` is the architecture, among whose tags it may be. Raises UserError."""
    origin = f"{setting}={value!r}"
    source = local_source(value, setting)
    if source:
        return source
    with library(f"{origin} cannot be fetched", FETCH_REMEDY):
        if value.startswith(HUB):
            return _in_folder(_from_hub(value.removeprefix(HUB)), origin, value.rpartition("/")[2])
        return _of_tag(value, name.replace("/", "-"), origin)


def local_source(value: str, setting: str = "model.weights") -> Source | None:
    """The weights that a setting names, if they are on this machine. Raises UserError for what is no weights."""
    origin = f"{setting}={value!r}"
    key = ""
    if not Path(value).expanduser().exists():
        value, _, key = value.partition(SET)
    source = _on_this_machine(value, origin, key)
    if source:
        return source
    if not (value.startswith(HUB) or re.fullmatch(r"[\w-]+", value)):
        raise UserError(
            f"{origin}: there is no {Path(value).expanduser()}; give a path that exists, a run, hf-hub:ORG/NAME, or a "
            "tag of open_clip"
        )
    return None


def _on_this_machine(value: str, origin: str, key: str) -> Source | None:
    path = Path(value).expanduser()
    run_named = run_folder(value.removeprefix(RUN))
    if value.startswith(RUN):
        if not is_run(run_named):
            raise UserError(f"{origin}: there is no run {run_named}")
        return _in_run(run_named, origin, key)
    if path.is_dir():
        return _in_folder(path, origin, path.resolve().name, key)
    if path.is_file():
        return Source(origin, path, _checked([path], origin), key=key)
    return _in_run(run_named, origin, key) if is_run(run_named) else None


def resolve_architecture(config: ModelConfig, *, chosen: bool) -> ModelConfig:
    """The settings of a model, with the architecture that its weights describe if they are on this machine.

    `chosen`: the user has also chosen a model, which has to be the same one. Otherwise the settings have a default.
    Raises UserError.
    """
    if weights_of_model := config.weights:
        source = local_source(weights_of_model)
        if not chosen and (weights_of_model.startswith(HUB) or (source and source.model.name)):
            config = replace(config, name="", architecture={})
        if source:
            config = with_architecture_of(config, source)
    towers = (("image", "vision_cfg", config.image.weights), ("text", "text_cfg", config.text.weights))
    for tower, section, weights in towers:
        setting = f"model.{tower}.weights"
        if weights and (source := local_source(weights, setting)):
            _check_fit(config, source, section)
    return config


def check_tags(config: ModelConfig) -> None:
    """Raise UserError for tags of another model."""
    for setting, weights in (
        ("model.weights", config.weights),
        ("model.image.weights", config.image.weights),
        ("model.text.weights", config.text.weights),
    ):
        if config.name and weights and not weights.startswith(HUB) and not local_source(weights, setting):
            _pretrained(weights, config.name.replace("/", "-"), f"{setting}={weights!r}")


def with_architecture_of(config: ModelConfig, source: Source) -> ModelConfig:
    """The settings with the architecture of the weights if they name none. Raises UserError for another one."""
    theirs = source.model
    if config.name:
        if theirs.name and (difference := _difference(config, theirs)):
            raise UserError(
                f"model.name={config.name}: {source.setting} is {theirs.name}, {difference}; leave model= out"
            )
        if not theirs.name:
            _check_fit(config, source, *COMPARED)
        return config
    if not theirs.name:
        raise UserError(f"{source.setting} does not describe its architecture; give a preset too, as model=vit-b32")
    return replace(
        config,
        name=theirs.name,
        architecture=theirs.architecture,
        image_size=config.image_size or theirs.image_size,
        context_length=config.context_length or theirs.context_length,
    )


def with_hub_architecture(config: ModelConfig) -> ModelConfig:
    """The settings with the architecture of a repository's weights, which are not fetched. Raises UserError."""
    value = config.weights or ""
    if config.name or not value.startswith(HUB):
        return config
    origin = f"model.weights={value!r}"
    with library(f"{origin} cannot be fetched", FETCH_REMEDY):
        folder = _snapshot(value.removeprefix(HUB), ["*.json"])
        return with_architecture_of(config, Source(origin, folder, model=_described(folder, value.rpartition("/")[2])))


def _difference(ours: ModelConfig, theirs: ModelConfig) -> str:
    """How two models differ; empty: they are the same one, perhaps of another resolution, or not known."""
    descriptions = [model.description for model in (ours, theirs)]
    if not all(descriptions):
        return ""
    values, others = map(_compared, descriptions)
    different = (key for key, value in values.items() if value != others[key])
    return next((f"whose {key} is {others[key]}, not {values[key]}" for key in different), "")


def _check_fit(config: ModelConfig, source: Source, *sections: str) -> None:
    """Raise UserError for files of weights that are damaged, or of other towers than these of the model."""
    description = config.description
    with source.reading():
        shapes = shapes_of(source.shards, source.key, source.setting)
    if not ({"embed_dim", *COMPARED} <= description.keys() and shapes):
        return
    prefix = PARTS[sections[0]] if len(sections) == 1 else ""
    match = matched(shapes, namings(known_names(), prefix), source.setting)
    ours = {match.names[name]: shape for name, shape in shapes.items() if name in match.names}
    tower = tower_alone(shapes, source.setting)
    wrong = ""
    if tower and tower != prefix:
        wrong = f"it has the {TOWERS[tower]} tower alone; give it as model.{TOWERS[tower]}.weights="
    elif match.of_model:  # else open_clip may know the names
        if config.is_captioner:
            ours.pop("visual.proj", None)  # of CLIP's, another width
        wrong = misfit(ours, _compared(description), sections, match.beside)
    if wrong:
        raise UserError(f"{source.setting} does not fit model.name={config.name}: {wrong}")


def _compared(description: Record) -> Record:
    """What a description says that weights must agree in. Raises what a value of another type raises."""
    values = {"embed_dim": description["embed_dim"], "quick_gelu": description.get("quick_gelu", False)}
    for section, defaults in COMPARED.items():
        words = defaults | description[section]
        words["mlp_ratio"] = int(words["width"] * words["mlp_ratio"])
        words["timm_model_name"] = re.sub(r"_\d+$", "", words.get("timm_model_name") or "")
        values |= {f"{section}.{name}": words[name] for name in defaults}
    return values


# -- where they are ----------------------------------------------------------------------------------------------------


def _in_run(folder: Path, origin: str, key: str) -> Source:
    """The weights of a checkpoint. `folder`: the checkpoint, or a run, whose newest one is taken; its best one if the
    key is `best`."""
    if (folder / "checkpoints").is_dir():
        folder = locate(folder, "best" if key == "best" else "latest")
        key = key if key != "best" else ""
    with files.reported(f"{origin}: damaged checkpoint", folder, "give another one of the run"):
        files.check_inside(folder / META, folder)
        trained = ModelConfig.of(files.read_json(folder / META)["meta"]["values"]["model_config"])
    return Source(origin, folder, model=trained, key=key)


def _in_folder(folder: Path, origin: str, name: str, key: str = "") -> Source:
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        if is_run(folder):
            return _in_run(folder, origin, key)
        raise UserError(f"{origin}: the folder holds {_instead_of_weights(folder)}")
    with library(f"{origin}: the folder cannot be used", f"; download it again, or give {path} and model="):
        shards = _checked(_shards_of(path), origin)
        size = sum(file.stat().st_size for file in shards)
        for file in folder.glob("*.json"):
            if file.stat().st_size > MAX_JSON_BYTES:
                raise ValueError(f"{file.name} is too large to describe a model")
        alone = _tower_of(folder)
        if alone and origin.startswith("model.weights="):
            raise UserError(f"{origin} has the {alone} tower alone; give it as model.{alone}.weights=")
        model = _described(folder, name)
        if model.name:
            _compared(model.architecture)
            if not _parameters(model.architecture) <= size:
                raise ValueError("it describes a larger model than these weights")
    return Source(origin, path, shards, model, key)


def _instead_of_weights(folder: Path) -> str:
    """What a folder without weights has, and the remedy."""
    if any((folder / name).is_file() for name in (adapters.CONFIG, *adapters.WEIGHTS)):
        return f"adapters of PEFT alone; merge first: {adapters.MERGE}"
    inner = [path for path in files.folders(folder) if any((path / name).is_file() for name in WEIGHTS)]
    if inner:  # of sentence-transformers, diffusers
        return f"no weights itself; give {' or '.join(map(str, inner))}"
    return f"no weights ({', '.join(WEIGHTS)}); give one that does, or a file"


def _tower_of(folder: Path) -> str:
    """The tower, `image` or `text`, that the configuration of transformers or timm in a folder describes alone."""
    if (folder / OPEN_CLIP).is_file() or not (folder / CONFIG).is_file():
        return ""
    content = files.read_json(folder / CONFIG)
    if "pretrained_cfg" in content:  # of timm
        return "image"
    return {"vision_model": "image", "text_model": "text"}.get(str(content.get("model_type")).partition("_")[2], "")


def _shards_of(path: Path) -> list[Path]:
    """A file of weights, or those that an index lists, which lie beside it. Raises ValueError, and as `_described`."""
    if not path.name.endswith(INDEX):
        return [path]
    names = sorted({*files.read_json(path)["weight_map"].values()})
    plain = r"[\w-][\w.-]*\.(safetensors|bin)"
    wrong = [name for name in names if not (re.fullmatch(plain, name) and (path.parent / name).is_file())]
    if wrong or not names:
        raise ValueError(f"{path.name}: {len(wrong)} of {len(names)} files are missing, as {wrong[:1]}")
    return [path.parent / name for name in names]


def _checked(paths: Sequence[Path], origin: str) -> tuple[Path, ...]:
    """Files of weights. Raises UserError for other files, and for those that would run code or fill the memory."""
    for path in paths:
        with path.open("rb") as file:
            start = file.read(16)
        if start.startswith(b"version https://"):
            raise UserError(f"{origin}: {path.name} is a pointer of Git LFS, not the weights; run `git lfs pull` there")
        if path.suffix != ".safetensors" and zipfile.is_zipfile(path):
            with Source(origin, path).reading(), zipfile.ZipFile(path) as archive:
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


def _described(folder: Path, name: str) -> ModelConfig:
    """What the configuration of open_clip, transformers or timm beside weights says; without a name: no architecture.

    Raises UserError, and what a value of another type raises.
    """
    description: Record = {}
    pixels: Record = {}
    mask = None
    if (folder / OPEN_CLIP).is_file():
        content = files.read_json(folder / OPEN_CLIP)
        description = content["model_cfg"]
        mask = content.get("correct_cls_mask")
        pixels = content.get("preprocess_cfg") or {}
    elif (folder / CONFIG).is_file():
        content = files.read_json(folder / CONFIG)
        model_type, _, tower = str(content.get("model_type")).partition("_")
        if model_type not in hugging_face.TABLES:  # perhaps a tower of timm
            pictures_config = content.get("pretrained_cfg") or content
            pixels = {key: pictures_config[key] for key in ("mean", "std") if key in pictures_config}
        else:
            pixels = hugging_face.pixels(folder, model_type)
            if not tower:
                with library(f"{folder / CONFIG} describes no model that can be built here"):  # nor by any model=
                    description = hugging_face.description(content)
                text = description["text_cfg"]
                if not hugging_face.has_clips_tokenizer(folder, text["vocab_size"]):
                    text["hf_tokenizer_name"] = model_type
    preprocess = checked_pixels(pixels)
    if not description:
        return replace(UNKNOWN_MODEL, preprocess=preprocess)
    check_words(description)
    text = description["text_cfg"]
    # The tokenizer is this folder if it has a tokenizer's files, as in open_clip. It always is for transformers.
    tokenizer_name = text.get("hf_tokenizer_name")
    if (
        tokenizer_name
        and not text.get("hf_model_name")
        and (tokenizer_name in hugging_face.TABLES or hugging_face.has_tokenizer(folder))
    ):
        text["hf_tokenizer_name"] = str(folder.resolve())
    correct = mask if isinstance(mask, bool) else None
    return ModelConfig(name, description, preprocess=preprocess, correct_cls_mask=correct)


def check_words(description: Record) -> None:
    """Raise ValueError for an open_clip description with a text that could be a path or an address, or a size < 0."""
    for key, value in description.items():
        if isinstance(value, dict):
            check_words(value)
        elif isinstance(value, str) and value and not NAME.fullmatch(value):
            raise ValueError(f"{key}={value[:80]!r} is no name")
        elif isinstance(value, int | float) and value < 0 and key != "init_logit_bias":
            raise ValueError(f"{key}={value} is no size")


def _parameters(description: Record) -> float:
    """A lower bound, usually close, of the number of parameters in open_clip's own transformers."""
    count = 0.0
    for section, defaults in COMPARED.items():
        words = defaults | description[section]
        if words.get("hf_model_name") or (words.get("timm_model_name") and "width" not in description[section]):
            continue
        patches = _largest(words.get("image_size", 0)) // words.get("patch_size", 1)
        tokens = words.get("vocab_size", 0) + words.get("context_length", 0) + patches**2
        layers = _largest(words["layers"]) * (4 + 2 * words["mlp_ratio"]) * words["width"]
        count += (layers + tokens) * words["width"]
    return count


def _largest(value: int | list[int]) -> int:
    return value if isinstance(value, int) else max(value)


def _snapshot(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=patterns))


def _from_hub(name: str) -> Path:
    safe = ["*.json", "*.txt", "*.model", "open_clip_model.safetensors", "model*.safetensors"]
    folder = _snapshot(name, safe)
    if not any((folder / file).is_file() for file in WEIGHTS):
        folder = _snapshot(name, [*safe, "*.bin"])
    return folder


def _pretrained(tag: str, name: str, origin: str) -> Record:
    """What open_clip says of a tag's weights. Raises UserError for a tag of another model."""
    table = pretrained()
    tags = table.list_pretrained_tags_by_model(name)
    if tag not in tags:
        models = ", ".join(table.list_pretrained_models_by_tag(tag))
        hint = f"it is one of {models}" if models else f"it has {', '.join(tags) or 'none'}"
        raise UserError(
            f"{origin} is no file, no folder, no run and no tag of model.name={name}{nearest(tag, tags)}; {hint}"
        )
    described = table.get_pretrained_cfg(name, tag)
    quick = described.get("quick_gelu", False)
    if quick != model_description(name).get("quick_gelu", False):
        right = name.removesuffix("-quickgelu") + ("-quickgelu" if quick else "")
        raise UserError(f"{origin} was trained with another activation; take model.name={right}")
    return dict(described)


def _of_tag(tag: str, name: str, origin: str) -> Source:
    import open_clip

    described = _pretrained(tag, name, origin)
    path = Path(open_clip.download_pretrained(described))
    return Source(origin, path, (path,), replace(UNKNOWN_MODEL, preprocess=checked_pixels(described)))


# -- how their pictures are prepared -----------------------------------------------------------------------------------


def checked_pixels(values: Record) -> Record:
    """Those `values` that are keys of `model.preprocess`. Raises UserError for wrong ones."""
    names = settings_of(Preprocess)
    preprocess = {key: value for key, value in values.items() if key in names}
    dataclass_from(Preprocess, preprocess)
    return preprocess
