"""The description of a model in a checkpoint chooses numbers and known names; it runs no code and reaches no other weights."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import open_clip
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipscale import checkpoint
from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.models import towers
from clipscale.models.description import FLAGS, NUMBERS, OPTIONS, source_of
from clipscale.models.towers import architecture, build_model, load_model
from tests.export.test_open_clip import ARCHITECTURE, saved
from tests.support.audit import heard


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("text_cfg", {"tokenizer_kwargs": {"trust_remote_code": True}}),
        ("text_cfg", {"tokenizer_kwargs": {"clean": "lower", "cache_dir": "/tmp/x"}}),
        ("text_cfg", {"hf_model_config": {"auto_map": {}}}),
        ("text_cfg", {"act_kwargs": {"_target_": "os.system"}}),
        ("text_cfg", {"layers": 100_000}),
        ("text_cfg", {"width": 10**9}),
        ("text_cfg", {"vocab_size": float("inf")}),
        ("text_cfg", {"context_length": "9" * 10**6}),
        ("vision_cfg", {"layers": [1] * 1000}),
        ("vision_cfg", {"timm_model_name": "hf-hub:stranger/model"}),
        ("vision_cfg", {"timm_model_name": "hf_hub:stranger/model"}),
        ("vision_cfg", {"timm_model_name": "local-dir:/tmp/model"}),
        ("vision_cfg", {"timm_model_name": "../model"}),
        ("vision_cfg", {"timm_kwargs": {"pretrained": True}}),
    ],
)
def test_a_received_description_is_refused(part: str, values: dict[str, Any]) -> None:
    description = deepcopy(open_clip.get_model_config("ViT-B-32"))
    assert description is not None
    description[part] |= values
    with pytest.raises(UserError, match=r"model\.architecture") as caught:
        architecture(ModelConfig(architecture=description))
    assert len(str(caught.value)) < 300


def test_the_descriptions_of_open_clip_are_accepted() -> None:
    for name in open_clip.list_models():
        description = open_clip.get_model_config(name)
        if description is not None and "multimodal_cfg" not in description:
            architecture(ModelConfig(name=name))


# -- whatever it says --------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [*NUMBERS, *FLAGS, *OPTIONS, "pool_type", "timm_model_name", "hf_model_name", "hf_tokenizer_name", "x"]
)
WORDS = st.text(max_size=8) | st.sampled_from(["tok", "linear", "vit_tiny_patch16_224"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
NAMES = KEYS | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


@contextmanager
def reaching_nothing() -> Iterator[None]:
    reached = list[str]()

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
            reached.append(event)

    with heard(note):
        yield
    assert not reached


@settings(max_examples=60)
@example(part="", key="\n", value=[])
@given(part=st.sampled_from(["", "vision_cfg", "text_cfg"]), key=KEYS | st.text(max_size=8), value=VALUES)
def test_any_description_builds_a_model_or_is_one_clear_line(part: str, key: str, value: Any) -> None:
    """On the meta device: the memory of what builds is `check_filled`'s matter."""
    description: dict[str, Any] = deepcopy(ARCHITECTURE)
    (description[part] if part else description)[key] = value
    started = time.monotonic()
    try:
        with reaching_nothing(), torch.device("meta"):
            build_model(ModelConfig("own", description))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, error
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "changes",
    [
        {"embed_dim": 2**14},
        {"text_cfg": {"layers": 512, "width": 2**14, "heads": 1024}},
        {"vision_cfg": {"image_size": 2**12, "patch_size": 1, "width": 2**14}},
    ],
)
def test_a_model_larger_than_its_checkpoint_is_never_built(tmp_path: Path, changes: dict[str, Any]) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE))
    (path,) = checkpoint.found(tmp_path / "run")
    state: dict[str, Any] = dict(checkpoint.load(path))
    described = deepcopy(ARCHITECTURE) | {"embed_dim": changes.get("embed_dim", 16)}
    for part in ("vision_cfg", "text_cfg"):
        described[part] |= changes.get(part, {})
    state["model_config"]["architecture"] = described
    checkpoint.save(tmp_path / "run", 8, state, keep=1)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(UserError, match=r"describes a model of \d+ weights"):
        load_model(tmp_path / "run")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert time.monotonic() - started < 30


def test_weights_that_repeat_one_number_are_refused(tmp_path: Path) -> None:
    """A tensor of any shape may have a storage of one number."""
    config = ModelConfig("own", deepcopy(ARCHITECTURE) | {"embed_dim": 2**13})
    model = {"w": torch.zeros(1).expand(2**40)}
    (tmp_path / "checkpoints").mkdir()
    older = {"format": 2, "step": 1, "model": model, "model_config": asdict(config)}
    torch.save(older, tmp_path / "checkpoints/step_00000001.pt")  # today's format has whole tensors
    with pytest.raises(UserError, match="its tensors have more bytes t"):
        load_model(tmp_path)


# -- the hub -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["roberta-base", "stranger/model", "./folder", "/etc"])
def test_names_reach_neither_the_network_nor_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.strip("/")).mkdir(parents=True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with reaching_nothing(), pytest.raises(UserError, match=r"set model\.hub=true"):
        source_of(name, hub=False)
    assert source_of(name, hub=True) == name


def test_what_the_local_cache_holds_needs_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--roberta-base"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert source_of("roberta-base", hub=False) == str(repository / "snapshots" / ("0" * 40))


@pytest.mark.parametrize("key", ["hf_model_name", "hf_tokenizer_name"])
def test_the_checkpoint_cannot_allow_the_hub_itself(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = deepcopy(ARCHITECTURE)
    described["text_cfg"][key] = "stranger/model"
    config = ModelConfig("own", described, hub=True)
    checkpoint.save(tmp_path, 1, {"model": {}, "model_config": asdict(config), "step": 1}, keep=1)
    seen: list[bool] = []

    def source(name: str, hub: bool) -> str:
        seen.append(hub)
        raise UserError("refused")

    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(towers, "source_of", source)
    monkeypatch.setattr(towers, "check_filled", lambda *_: None)
    for hub in (False, True):
        with pytest.raises(UserError, match="refused"):
            load_model(tmp_path, hub=hub)
    assert seen == [False, True]


def test_no_file_allows_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/received.yaml").write_text("# @package _global_\nmodel:\n  hub: true\n")
    assert main(["train", "--config-dir", str(tmp_path), "experiment=received", "data.train=/nowhere/0.tar"]) == 2
    assert "model.hub" in capsys.readouterr().err
