"""The weights of the right model are found under any wrapper; other models are recognised by their keys."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clipscale.cli.train_checks import check_weights
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.train_config import TrainConfig
from clipscale.models.towers import build_model
from clipscale.models.weights.hugging_face import MODEL_TYPES
from clipscale.models.weights.key_styles import key_pattern, known_names
from clipscale.models.weights.load_weights import convert, read
from clipscale.models.weights.model_settings import resolve_architecture
from clipscale.models.weights.renaming import to_transformers
from clipscale.models.weights.shapes import shapes_of
from clipscale.models.weights.sources import find_source, local_source
from tests.models.weights.test_load_weights import SMALL, config, random_model, state_of
from tests.support.checkpoints import save

State = dict[str, Any]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return state_of(random_model(1))


@pytest.fixture(scope="module")
def encoders() -> Any:
    """Another model, as open_clip names its weights."""
    model = random_model(2)
    made = torch.nn.Module()
    made.visual, made.text = model.image.encoder, model.text.encoder
    made.logit_scale = model.logit_scale
    return made


def under(prefix: str) -> Callable[[State], State]:
    return lambda state: {f"{prefix}{name}": value for name, value in state.items()}


def between(segment: str) -> Callable[[State], State]:
    """A change of names: a segment behind each tower's name."""
    return lambda state: {re.sub(r"^(visual|text)\.", rf"\1.{segment}.", name): x for name, x in state.items()}


def older(state: State) -> State:
    return {name.removeprefix("text."): value for name, value in state.items()}


HEAD = {"head.weight": torch.ones(3), "criterion.weight": torch.ones(3)}
WRAPPED: dict[str, Callable[[State], State]] = {
    "module.": under("module."),
    "_orig_mod.module.": under("_orig_mod.module."),
    "student.": under("student."),
    "clipmodel.": under("clipmodel."),
    "transformer.": under("transformer."),
    "0.": under("0."),
    "_forward_module.": under("_forward_module."),
    "base_model.model.": under("base_model.model."),
    "_orig_mod.": between("_orig_mod"),
    "visual.module and text.module": between("module"),
    "model., in open_clip's older layout": lambda state: under("model.")(older(state)),
    "clip., in transformers' names": lambda state: under("clip.")(to_transformers(state, "clip")),
    "net": lambda state: {"net": state, "epoch": 3},
    "DeepSpeed": lambda state: {"module": state, "ds_version": "0.9", "optimizer": None},
    "deep": lambda state: {"a": {"b": {"module": under("module.")(state)}}, "optimizer": {"state": {0: state}}},
    "Lightning": lambda state: {"state_dict": under("model.")(state) | HEAD, "epoch": 3},
    "a block": lambda state: {
        name.replace("resblocks.0.", "resblocks.0._checkpoint_wrapped_module."): x for name, x in state.items()
    },
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_the_weights_of_the_right_model_are_found_under_any_wrapper(
    tmp_path: Path, weights: State, encoders: Any, wrap: Callable[[State], State], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "w.pt"
    torch.save(wrap(dict(weights)), file)
    resolve_architecture(config(weights=str(file)), chosen=True)
    source = find_source(str(file), "small")
    found = convert(read(source), encoders, source)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    if wrap is WRAPPED["Lightning"]:
        assert "without model.; left over: criterion.weight, head.weight" in caplog.text


def llava(state: State) -> State:
    theirs = {name: x for name, x in to_transformers(state, "clip").items() if name.startswith("vision_model.")}
    language = {"model.layers.0.self_attn.q_proj.weight": torch.ones(3), "model.mm_projector.weight": torch.ones(3)}
    return under("model.vision_tower.vision_tower.")(theirs) | language


def test_a_language_models_vision_tower(tmp_path: Path, weights: State, encoders: Any) -> None:
    file = tmp_path / "w.safetensors"
    save_file({name: value.contiguous() for name, value in llava(dict(weights)).items()}, file)
    start = ModelConfig("mine", SMALL, image=TowerConfig(str(file)))
    resolve_architecture(start, chosen=True)
    source = find_source(str(file), "mine", "model.image.weights")
    found = convert(read(source), encoders, source, "visual.")
    expected = {name for name in weights if name.startswith("visual.") and name != "visual.proj"}
    assert found.keys() == expected and all(torch.equal(found[name], weights[name]) for name in expected)


def towers(state: State) -> State:
    return {name: value for name, value in state.items() if name.startswith("visual.")}


TWO = {
    "student": lambda state: under("student.")(state) | under("teacher.")(state),
    "visual_encoder": lambda state: {name.replace("visual.", "backbone.stages."): x for name, x in state.items()},
}
REFUSED: list[tuple[str, Callable[[State], State], str]] = [
    ("model.weights", TWO["student"], r"two sets.*below student\. and teacher\.; give FILE::student or FILE::teacher"),
    ("model.weights", towers, r"image tower alone; give it as model.image.weights="),
    ("model.text.weights", towers, r"image tower alone; give it as model.image.weights="),
    ("model.weights", llava, r"image tower alone; give it as model.image.weights="),
    ("model.weights", under("x."), ""),
    ("model.weights", TWO["visual_encoder"], r"names differ: no visual\S*, but backbone\.stages"),
    (
        "model.weights",
        lambda _: {"layers.0.weight": torch.ones(2)},
        r"names differ: no logit_scale, but layers.0.weight",
    ),
    ("model.image.weights", lambda _: {"a.b": torch.ones(2)}, r"names differ: no visual.*, but a.b"),
]


@pytest.mark.parametrize(("setting", "change", "message"), REFUSED)
def test_other_names_are_shown_beside_the_models_and_no_other_model_is_asked_for(
    tmp_path: Path, weights: State, setting: str, change: Callable[[State], State], message: str
) -> None:
    file = str(tmp_path / "w.pt")
    torch.save(change(dict(weights)), file)
    part = setting.split(".")[1]
    start = config(weights=file) if part == "weights" else config(**{part: TowerConfig(file)})
    if not message:
        build_model(resolve_architecture(start, chosen=True))
        return
    with pytest.raises(UserError, match=rf"{setting}='.*w.pt'.*{message}") as refused:
        build_model(resolve_architecture(start, chosen=True))
    assert "another model" not in str(refused.value)


# ---- several sets of weights ----


@pytest.mark.parametrize(
    ("names", "taken"),
    [(("state_dict", "state_dict_ema"), 0), (("model", "model_ema"), 0), (("ema", "model"), 1), (("net", "mean"), 0)],
)
def test_of_several_sets_one_is_taken_others_are_named_and_can_be_chosen(
    tmp_path: Path, names: tuple[str, str], taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    states = [state_of(random_model(seed)) for seed in (1, 2)]
    torch.save(dict(zip(names, states)), tmp_path / "w.pt")
    for key, expected in (("", states[taken]), *((f"::{name}", state) for name, state in zip(names, states))):
        caplog.clear()
        source = find_source(f"{tmp_path}/w.pt{key}", "small")
        assert torch.equal(read(source)["visual.proj"], expected["visual.proj"])
        assert (f"::{names[1 - taken]}" in caplog.text) == (not key)
    with pytest.raises(UserError, match=f"nothing at 'average', but {names[0]}, {names[1]}"):
        read(find_source(f"{tmp_path}/w.pt::average", "small"))


def test_sets_below_a_prefix_of_names_can_be_chosen(tmp_path: Path) -> None:
    states = {name: state_of(random_model(seed)) for seed, name in enumerate(("student", "teacher"))}
    file = tmp_path / "w.safetensors"
    save_file({f"{name}.{key}": x.clone() for name, state in states.items() for key, x in state.items()}, file)
    for name, state in states.items():
        start = config(weights=f"{file}::{name}")
        assert torch.equal(read(find_source(str(start.weights), "small"))["visual.proj"], state["visual.proj"])
        resolve_architecture(start, chosen=True)


def test_the_average_of_a_run_can_be_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = random_model(1)
    average = random_model(2)
    values = {"model_config": {"name": "small", "architecture": SMALL}}
    ema = {"weights": dict(average.state_dict()), "updates": 3}
    save(tmp_path / "run", 3, {"model": trained.state_dict(), "ema": ema, **values}, keep=0)
    save(tmp_path / "other", 3, {"model": trained.state_dict(), **values}, keep=0)
    for key, model in (("", trained), ("::ema", average)):
        source = find_source(f"{tmp_path}/run{key}", "small")
        assert torch.equal(read(source)["visual.proj"], model.image.encoder.proj)
    assert "::ema" in caplog.text
    for value in ("other::ema", "run::average"):
        with pytest.raises(UserError, match="the run has no"):
            read(find_source(f"{tmp_path}/{value}", "small"))


def test_a_checkpoint_that_names_itself_ends(tmp_path: Path) -> None:
    content: dict[str, Any] = {"state_dict": {"a": torch.ones(1)}}
    content["itself"] = content
    torch.save(content, tmp_path / "w.pt")
    assert shapes_of([tmp_path / "w.pt"], "", "x") == {"a": (1,)}


# ---- PEFT ----

LORA = {"r": 2, "lora_alpha": 6, "peft_type": "LORA"}
ADAPTED = "visual.transformer.resblocks.0.mlp.c_fc"


def adapted(state: State, *, base: bool = True) -> State:
    """Weights as PEFT's model names them, with an adapter of one layer."""
    new = dict(state)
    new[f"{ADAPTED}.base_layer.weight"] = new.pop(f"{ADAPTED}.weight")
    new[f"{ADAPTED}.base_layer.bias"] = new.pop(f"{ADAPTED}.bias")
    random = torch.Generator().manual_seed(0)
    rows, columns = state[f"{ADAPTED}.weight"].shape
    new[f"{ADAPTED}.lora_A.default.weight"] = torch.randn(2, columns, generator=random)
    new[f"{ADAPTED}.lora_B.default.weight"] = torch.randn(rows, 2, generator=random)
    return under("base_model.model.")(new if base else {n: x for n, x in new.items() if "lora_" in n})


def test_adapters_are_added_to_their_weights(tmp_path: Path, weights: State, encoders: Any) -> None:
    state = adapted(dict(weights))
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    torch.save(state, tmp_path / "w.pt")
    resolve_architecture(config(weights=f"{tmp_path}/w.pt"), chosen=True)
    source = find_source(f"{tmp_path}/w.pt", "small")
    found = convert(read(source), encoders, source)
    down, up = (state[f"base_model.model.{ADAPTED}.lora_{x}.default.weight"] for x in "AB")
    torch.testing.assert_close(found[f"{ADAPTED}.weight"], weights[f"{ADAPTED}.weight"] + 3 * up @ down)
    others = weights.keys() - {f"{ADAPTED}.weight"}
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in others)


@pytest.mark.parametrize(
    "config_", [None, LORA | {"use_dora": True}, LORA | {"r": 0}, {"r": 2}, LORA | {"rank_pattern": {"c_fc": 4}}]
)
@pytest.mark.parametrize("base", [True, False])
def test_adapters_of_an_unknown_factor_are_to_be_merged_first(
    tmp_path: Path, weights: State, config_: Any, base: bool
) -> None:
    if config_ is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config_))
    save_file({n: x.contiguous() for n, x in adapted(dict(weights), base=base).items()}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"adapters of PEFT, such as base_model\S*lora_A.*; merge first"):
        resolve_architecture(config(weights=f"{tmp_path}/w.safetensors"), chosen=True)


# ---- folders ----


def test_folders_that_are_nearly_weights_are_named_as_what_they_are(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("peft", "sentence", "image", "text", "timm")}
    inner = places["sentence"] / "0_CLIPModel"
    for place in (*places.values(), inner):
        place.mkdir()
    for folder in (places["image"], places["text"], places["timm"], inner):
        save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    (places["peft"] / "adapter_model.safetensors").write_bytes(b"")
    (places["sentence"] / "modules.json").write_text("[]")
    for name in ("image", "text"):
        kind = {"image": "clip_vision_model", "text": "clip_text_model"}[name]
        (places[name] / "config.json").write_text(json.dumps({"model_type": kind}))
    (places["timm"] / "config.json").write_text(json.dumps({"architecture": "vit", "pretrained_cfg": {}}))
    for name, message in {
        "peft": "adapters of PEFT alone; merge first",
        "sentence": f"give {inner}",
        "image": "image tower alone; give it as model.image.weights=",
        "timm": "image tower alone; give it as model.image.weights=",
        "text": "text tower alone; give it as model.text.weights=",
    }.items():
        with pytest.raises(UserError, match=message):
            local_source(str(places[name]))
    for name in ("image", "text"):
        assert local_source(str(places[name]), f"model.{name}.weights")


@pytest.mark.parametrize(
    ("tower", "content"),
    [
        ("image", {"model_type": "clip_vision_model"}),
        ("image", {"architecture": "vit", "pretrained_cfg": {}}),
        ("text", {"model_type": "clip_text_model"}),
    ],
)
def test_a_folder_with_one_tower_is_taken_as_that_towers_weights(
    tmp_path: Path, tower: str, content: dict[str, Any]
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(content))
    check_weights(TrainConfig(model=ModelConfig(**{tower: TowerConfig(str(tmp_path))})))


def test_the_table_has_the_names_that_open_clip_gives(weights: State) -> None:
    assert {key_pattern(name) for name in weights} <= {*known_names()}
    assert MODEL_TYPES.keys() == {"clip", "siglip"}
