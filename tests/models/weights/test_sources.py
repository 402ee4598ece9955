"""Weights decide the model: they replace a default one, and refuse another one that was chosen."""

import pickle
import re
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clipscale.checkpoint import CheckpointDescription
from clipscale.cli.compose import compose_settings
from clipscale.cli.main import main
from clipscale.cli.train_checks import check_weights
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.libraries import model_description
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.train_config import TrainConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.models.weights.model_settings import resolve_architecture, with_architecture_of, with_hub_architecture
from clipscale.models.weights.sources import Source
from clipscale.run_folder.paths import checkpoint_path
from tests.models.weights.test_load_weights import (
    SMALL,
    config,
    custom,
    open_clip_folder,
    plain,
    random_model,
    state_of,
)
from tests.support.checkpoints import save_model
from tests.support.interpreter import interpreted

TABLES = files.read_yaml(Path(__file__).with_name("sources.yaml"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `start` and the folder `theirs`."""
    folder = tmp_path_factory.mktemp("sources")
    started = config(image_size=48, architecture=SMALL | {"quick_gelu": True})
    save_model(folder / "runs/start", build_model(started), started)
    theirs = random_model(1)
    open_clip_folder(folder / "theirs", theirs)
    save_file(state_of(theirs), folder / "bare.safetensors")
    torch.save({"epoch": 1, "state_dict": state_of(theirs)}, folder / "bare.pt")
    for name in ("text.pt", "text.safetensors"):
        (folder / name).write_text("no weights")
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, where the test runs."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("verb", ["train", pytest.param("plan", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "weights", ["start", "run:start", "runs/start", "run:runs/start", "runs/start/checkpoints/step_00000007"]
)
def test_a_run_brings_its_model_whatever_the_preset_says(place: Path, verb: str, weights: str) -> None:
    composed = compose_settings(verb, ["experiment=finetune", f"model.weights={weights}", "data=demo"])
    assert (composed.model.name, composed.model.image_size) == ("small", 48)
    assert composed.model.architecture["embed_dim"] == SMALL["embed_dim"]
    assert composed.model.image.layer_decay == 0.75, "the rest of the preset stays"


def test_a_run_that_resumes_another_has_the_others_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checkpoints count after a restart and in a sweep."""
    monkeypatch.chdir(tmp_path)
    for name, width in (("other", 16), ("own", 24), ("sweep/0", 24)):
        checkpoint_path(Path("runs") / name, 1).mkdir(parents=True)
        model = config(architecture=SMALL | {"embed_dim": width})
        files.write_json(Path("runs") / name / "config.yaml", {"model": asdict(model)})
    words = ["model.weights=start", "resume=other"]

    def resumed_width(run: str, **given: str) -> int:
        return compose_settings("train", [*words, f"run={run}"], **given).model.architecture["embed_dim"]

    assert resumed_width("own") == 16
    assert resumed_width("sweep", in_sweep="0") == 24
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resumed_width("own") == 24


def test_weights_bring_their_logit_bias_to_a_loss_that_uses_it(place: Path) -> None:
    """A softmax run has none: CLIP of transformers could not take it."""
    started = config(init_bias=-7.0)
    trained = build_model(started)
    torch.nn.init.constant_(trained.logit_bias, -3.0)
    save_model(Path("runs/sigmoid"), trained, started)
    save_file(state_of(trained), "sigmoid.safetensors")
    for words in (["loss.objective=sigmoid"], ["stages=[{samples: 2k}, {samples: 2k, loss: sigmoid}]"]):
        composed = compose_settings("train", ["model.weights=sigmoid", *words]).model
        assert composed.init_bias == -7
    assert build_model(composed).logit_bias == -3
    given = compose_settings("train", ["model.weights=sigmoid", "loss=siglip"]).model
    assert given.init_bias == -10, "a value that is given stays"
    for verb in ("train", "eval"):
        assert compose_settings(verb, ["model.weights=sigmoid"]).model.init_bias is None
    for weights in ("sigmoid", "sigmoid.safetensors"):
        chosen = config(weights=weights)
        composed = resolve_architecture(chosen, chosen=True, needs_bias=True)
        assert build_model(composed).logit_bias == -3
        saved = CheckpointDescription(model_config=asdict(composed))
        assert completed_by_weights(chosen, saved).init_bias == composed.init_bias, "it is so when the run goes on"
        assert resolve_architecture(chosen, chosen=True).init_bias is None
    for weights in ("start", "bare.safetensors"):
        assert resolve_architecture(config(weights=weights), chosen=False, needs_bias=True).init_bias is None


def test_a_folder_brings_its_model_and_weights_without_a_description_keep_the_default(place: Path) -> None:
    for verb in ("train", "eval", "embed", "explore"):
        composed = compose_settings(verb, ["model.weights=theirs"])
        assert (composed.model.name, composed.model.architecture) == ("theirs", SMALL)
    assert compose_settings("train", ["model.weights=laion2b_s34b_b79k"]).model.name == "ViT-B-32"
    chosen = config(weights="bare.safetensors")
    assert resolve_architecture(chosen, chosen=False) == chosen


@pytest.mark.parametrize(
    ("words", "message"),
    TABLES["others"],
)
def test_another_model_that_was_chosen_is_refused(place: Path, words: list[str], message: str) -> None:
    for verb in ("train", "eval"):
        with pytest.raises(UserError, match=message):
            compose_settings(verb, words)


@pytest.mark.parametrize(
    ("change", "fits"),
    TABLES["chosen"],
)
def test_the_same_model_may_be_chosen_of_another_resolution(change: dict[str, Any], fits: bool) -> None:
    described = model_description("ViT-B-32")
    for key, value in change.items():
        described[key] = described[key] | value if isinstance(value, dict) else value
    source = Source("model.weights='b32'", Path(), model=ModelConfig("b32", described))
    chosen = ModelConfig("ViT-B-32")
    if fits:
        assert with_architecture_of(chosen, source) == chosen
    else:
        with pytest.raises(UserError, match=f"is b32, whose .*{'quick' if 'quick_gelu' in change else 'cfg'}"):
            with_architecture_of(chosen, source)


def test_a_repository_is_described_before_its_weights_are_fetched(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(place / "theirs")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    composed = compose_settings("plan", ["experiment=finetune", "model.weights=hf-hub:org/their-clip"])
    assert not asked, "settings use no network"
    model = with_hub_architecture(composed.model)
    assert (model.name, model.architecture, asked) == ("their-clip", SMALL, [["*.json"]])


WRONG = {
    "model.weights=theirs/none": "there is no theirs/none",
    "model.weights=run:none": "there is no run runs/none",
    "model.weights=bare.safetensors": "not fit model.name=ViT-B-32: its visual.conv1.weight is (32, 3, 8, 8)",
    "model=siglip-b16 model.text.weights=bare.safetensors": "its text.token_embedding.weight is (49408, 32)",
    "model=rn50 model.weights=bare.safetensors": "it has visual.proj",
    "model.weights=text.safetensors": "cannot be read as weights",
    "model.weights=text.pt": "neither safetensors nor written by torch.save",
    "model.weights=hf-hub:org/none": "org/none is not on this machine",
    "model.weights=hf-hub:a/b/c": "a/b/c is not a repository",
    "model=siglip-b16": "timm/ViT-B-16-SigLIP is not on this machine",
    "model.image.weights=empty": "holds no weights",
    "model=vit-b32 model.weights=start": "is small",
    "model.weights=laion2b_s34b_b79": "tag of model.name=ViT-B-32; did you mean 'laion2b_s34b_b79k'",
    "model.weights=laion2b_s34b_b79k": "b79K is not on this machine, and cannot be fetched: http://127.0.0.1:9 has",
}


def test_what_is_wrong_with_weights_is_said_before_torch_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last two cases are tags, which only open_clip knows."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (place / "empty").mkdir()
    *light, tag, other = (["train", "data=demo", *words.split()] for words in WRONG)
    code = f"""
import sys
from clipscale.cli import compose, main
from tests.support.composing import compose_once
compose.compose_config = compose_once
for words in {light}:
    main.main(words)
assert "torch" not in sys.modules
"""
    done = interpreted(code)
    assert (done.returncode, main(tag), main(other)) == (0, 2, 2), done.stderr
    lines = re.findall("error: .*", done.stderr + capsys.readouterr().err)
    assert len(lines) == len(WRONG), lines
    assert all(message in line for message, line in zip(WRONG.values(), lines)), lines


def test_weights_need_no_server_where_they_are_cached_or_a_run_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place))
    with pytest.raises(UserError, match="has no answer"):
        check_weights(TrainConfig(model=ModelConfig("ViT-B-32", weights="hf-hub:org/theirs")))
    check_weights(TrainConfig(model=ModelConfig("ViT-B-32", weights="hf-hub:org/theirs"), run="start"))
    (place / "models--org--theirs/refs").mkdir(parents=True)
    (place / "models--org--theirs/refs/main").write_text("0" * 40)
    (place / f"models--org--theirs/snapshots/{'0' * 40}").mkdir(parents=True)
    check_weights(TrainConfig(model=ModelConfig("ViT-B-32", weights="hf-hub:org/theirs")))


class Runs:
    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Runs(), 2), b"\x80\x02r\xff\xff\xff\x7f.", b"\x80\x02X\xff\xff\xff\x7fa."]
)
def test_a_file_of_weights_runs_nothing_and_takes_no_more_memory_than_it_has(place: Path, content: bytes) -> None:
    with zipfile.ZipFile("x.pt", "w") as archive:
        archive.writestr("x/data.pkl", content)
    tracemalloc.start()
    with pytest.raises(UserError, match="cannot be read as weights"):
        resolve_architecture(config(weights="x.pt"), chosen=False)
    assert tracemalloc.get_traced_memory()[1] < 2**26 and not Path("ran").exists()
    tracemalloc.stop()


OTHERS = [
    ({"vision_cfg": {"patch_size": 16}}, r"its visual.conv1.weight is \(32, 3, 8, 8\), not \(32, 3, 16, 16\)"),
    ({"vision_cfg": {"layers": 3}}, "its blocks are 2, not 3"),
    ({"vision_cfg": {"timm_model_name": "test_vit"}}, "it has visual.proj"),
    ({"text_cfg": {"vocab_size": 99}}, r"its text.token_embedding.weight is \(49408, 32\), not \(99, 32\)"),
    ({"text_cfg": {"mlp_ratio": 2.0}}, r"its text.transformer.resblocks.0.mlp.c_fc.weight is \(128, 32\)"),
    ({"embed_dim": 8}, "not \\(32, 8\\)"),
]


@pytest.mark.parametrize("write", [custom, plain])
@pytest.mark.parametrize(("change", "message"), OTHERS)
def test_weights_of_another_model_are_refused_by_their_shapes(
    tmp_path: Path, write: Callable[[Path, ClipModel], Path], change: dict[str, Any], message: str
) -> None:
    """It happens when the settings are read, before a plan or a model."""
    weights = str(write(tmp_path, random_model(1)))
    other = {key: SMALL[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    part = "text" if "text_cfg" in change else "image"
    for chosen in (
        ModelConfig("mine", SMALL | other, weights=weights),
        ModelConfig("mine", SMALL | other, **{part: TowerConfig(weights)}),
    ):
        with pytest.raises(UserError, match=f"weights='.*' does not fit model.name=mine: .*{message}.*; give another"):
            resolve_architecture(chosen, chosen=True)
    assert resolve_architecture(config(weights=weights, image_size=48), chosen=True).image_size == 48, (
        "positions are resized"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.weights=laion2b_s32b_b82k", "tag of model.name=ViT-B-32.*it is one of ViT-L-14"),
        ("model=vit-l14 model.text.weights=laion2b_s34b_b79k", "tag of model.name=ViT-L-14"),
        ("model.weights=openai", "another activation; take model.name=ViT-B-32-quickgelu"),
    ],
)
def test_a_tag_of_another_model_is_refused_by_open_clip(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_weights(compose_settings("train", words.split()), checks_connection=False)
