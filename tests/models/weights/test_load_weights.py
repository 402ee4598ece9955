"""Weights of every source give the features of the model they come from; those that do not fit are refused."""

import json
import pickle
import re
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from clipscale.checkpoint import CheckpointDescription
from clipscale.checkpoint.format import META, meta_text, read_meta, values_text
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.descriptions import described_model
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.models.weights.sources import find_source
from clipscale.tools.export.open_clip import open_clip_description, weights
from tests.conftest import Capture
from tests.support.checkpoints import save_model
from tests.support.towers import architecture

SMALL = architecture(32, 8, 12)
PIXELS = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
TOKENS = open_clip.SimpleTokenizer(context_length=12)(["a red ring", "two cats on a chair"])
HALF = (0.5, 0.5, 0.5)


def config(**values: Any) -> ModelConfig:
    return ModelConfig(**({"name": "small", "architecture": SMALL} | values))


def features(model: ClipModel, pixels: Tensor = PIXELS) -> tuple[Tensor, Tensor]:
    model.eval()
    with torch.no_grad():
        return model.image(pixels), model.text(TOKENS)


def random_model(seed: int, **values: Any) -> ClipModel:
    torch.manual_seed(seed)
    return build_model(config(**values))


def state_of(model: ClipModel) -> dict[str, Tensor]:
    """open_clip's names of the weights."""
    return weights(model)


def run(folder: Path, model: ClipModel) -> Path:
    save_model(folder, model, config(), 3)
    return folder


def plain(folder: Path, model: ClipModel) -> Path:
    """open_clip's older layout, wrapped as its trainer does."""
    state = {n.removeprefix("text."): v for n, v in state_of(model).items()}
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": v for n, v in state.items()}}, folder / "w.pt")
    return folder / "w.pt"


def custom(folder: Path, model: ClipModel) -> Path:
    save_file(state_of(model), folder / "w.safetensors")
    return folder / "w.safetensors"


def open_clip_folder(folder: Path, model: ClipModel, described: dict[str, Any] = SMALL) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state_of(model), folder / "open_clip_model.safetensors")
    pixels = {"mean": HALF, "std": HALF, "interpolation": "bilinear", "resize_mode": "squash"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": described, "preprocess_cfg": pixels}))
    return folder


@pytest.mark.parametrize("write", [run, plain, custom, open_clip_folder])
def test_weights_of_every_layout_give_the_same_features(
    tmp_path: Path, write: Callable[[Path, ClipModel], Path]
) -> None:
    reference = random_model(1)
    prefix = "run:" if write is run else ""
    ours = build_model(config(weights=f"{prefix}{write(tmp_path, reference)}"))
    assert all(map(torch.equal, features(ours), features(reference)))


def test_each_tower_has_weights_of_its_own(tmp_path: Path) -> None:
    one = random_model(1)
    two = random_model(2)
    (tmp_path / "two").mkdir()
    first = custom(tmp_path, one)
    second = plain(tmp_path / "two", two)
    torch.save(one.image.encoder.state_dict(), tmp_path / "image.pt")
    for image in (first, tmp_path / "image.pt"):
        ours = build_model(config(image=TowerConfig(str(image)), text=TowerConfig(str(second))))
        assert torch.equal(features(ours)[0], features(one)[0]) and torch.equal(features(ours)[1], features(two)[1])


# ---- what comes with weights ----


def test_a_folder_describes_its_model_and_how_its_pictures_are_prepared(tmp_path: Path) -> None:
    reference = random_model(1)
    config = completed_by_weights(
        ModelConfig(name="", weights=str(open_clip_folder(tmp_path, reference)), preprocess={"std": [0.1] * 3})
    )
    assert config.architecture == SMALL and config.pixels.mean == HALF and config.pixels.std == (0.1, 0.1, 0.1)
    assert (config.pixels.resize_mode, config.pixels.interpolation) == ("squash", "bilinear")
    assert torch.equal(features(build_model(config))[1], features(reference)[1])
    with pytest.raises(UserError, match="does not describe its architecture; give a preset"):
        completed_by_weights(ModelConfig(name="", weights=str(custom(tmp_path, reference))))


@pytest.mark.parametrize(("said", "taken"), [("bilinear", "bilinear"), ("random", "bicubic")])
def test_pictures_are_resized_as_a_tower_of_timm_was_trained(tmp_path: Path, said: str, taken: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": {"mean": HALF, "interpolation": said}}))
    pixels = described_model(tmp_path, "tower").pixels
    assert (pixels.mean, pixels.interpolation) == (HALF, taken)


def test_training_prepares_pictures_as_the_weights_of_the_image_tower_and_goes_on_so(tmp_path: Path) -> None:
    folder = str(open_clip_folder(tmp_path / "a", random_model(1)))
    bare = str(custom(tmp_path, random_model(1)))
    for start in (config(weights=folder), config(weights=bare, image=TowerConfig(folder))):
        begun = completed_by_weights(start)
        assert (begun.pixels.mean, begun.pixels.std, begun.pixels.resize_mode) == (HALF, HALF, "squash")
        saved = CheckpointDescription(
            model_config=asdict(replace(begun, image_size=48)) | {"lora": 0}
        )  # as of an earlier version
        resumed = completed_by_weights(config(weights=bare), saved)
        assert (resumed.pixels.mean, resumed.image_size) == (HALF, 48), "whatever the weights say"
    for start in (config(weights=bare), config(text=TowerConfig(folder)), config()):
        assert completed_by_weights(start) == start


# ---- hostile and damaged files, and weights that do not fit ----


class Code:
    def __reduce__(self) -> Any:
        return (Path("executed").touch, ())


def test_a_file_of_weights_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Code()))
    torch.save({"state_dict": {"visual.conv1.weight": torch.ones(1), "x": Code()}}, "new.pt")
    Path("text.safetensors").write_text("no weights")
    Path("flip.pt").write_bytes(Path("new.pt").read_bytes().replace(b"PK\1\2", b"PK\1\3"))
    for name in ("old.pt", "new.pt", "text.safetensors", "flip.pt"):
        with pytest.raises(UserError, match=rf"^model.weights='{name}' cannot be read as weights"):
            build_model(config(weights=name))
    assert not Path("executed").exists()


def test_a_downloaded_folder_is_no_run_and_its_metadata_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of open_clip with a checkpoint inside once executed code."""
    monkeypatch.chdir(tmp_path)
    folder = run(open_clip_folder(tmp_path / "got", random_model(1)), random_model(2))
    step = folder / "checkpoints/step_00000003"
    assert find_source(str(folder), "small").path.name == "open_clip_model.safetensors"
    content = pickle.dumps(Code())
    meta = read_meta(step)
    sums = {name: tuple(sum_of_file) for name, sum_of_file in meta["files"].items()}
    (step / ".metadata").write_bytes(content)
    files = sums | {".metadata": (len(content), zlib.crc32(content))}
    (step / META).write_text(meta_text(values_text(meta["values"]), files))
    with pytest.raises(UserError, match="does not belong into"):
        build_model(config(weights=f"run:{folder}"))
    assert not Path("executed").exists()


def test_a_compressed_file_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    """A file of 2 MB may hold 2 GiB of zeros."""
    stored = tmp_path / "stored.pt"
    packed = tmp_path / "packed.pt"
    torch.save(state_of(random_model(1)), stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    with pytest.raises(UserError, match=r"packed.pt.*is compressed"):
        build_model(config(weights=str(packed)))
    build_model(config(weights=str(stored)))


def test_files_that_are_no_weights_are_named_as_what_they_are(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "ViT-B-32.pt"))
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    torch.save({"a": torch.zeros(1).expand(10**12)}, tmp_path / "wide.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    np.savez(tmp_path / "b16.npz", **{"params/img/head/bias": np.zeros(2)})
    for name, message in (
        ("module.pt", r"objects of Python, as torch\S*Linear, .*; save model.state_dict\(\) alone"),
        ("tensor.pt", "it holds a Tensor, not weights by name"),
        ("b16.npz", "arrays of numpy, as big_vision's.*model.weights=webli"),
        ("ViT-B-32.pt", "TorchScript archive.*model.weights=openai"),
        ("model.safetensors", "git lfs pull"),
        ("", "git lfs pull"),
        ("wide.pt", "a takes more memory than the file has"),
    ):
        with pytest.raises(UserError, match=message):
            build_model(config(weights=str(tmp_path / name)))


@pytest.mark.parametrize("name", ["/etc", "../other", "hf-hub:a/b", "https://a/b"])
@pytest.mark.parametrize("part", ["text_cfg.hf_tokenizer_name", "vision_cfg.timm_model_name"])
def test_a_strangers_description_names_no_path_and_no_address(tmp_path: Path, part: str, name: str) -> None:
    folder = open_clip_folder(tmp_path, random_model(1))
    content = json.loads((folder / "open_clip_config.json").read_text())
    tower, key = part.split(".")
    content["model_cfg"][tower][key] = name
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{key}='{name}' is not a name"):
        completed_by_weights(ModelConfig(name="", weights=str(folder)))


def test_positions_are_resized_with_a_notice_for_another_resolution(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = random_model(1)
    ours = build_model(config(weights=str(custom(tmp_path, reference)), image_size=48))
    assert ours.image_size == 48 and ours.image.encoder.positional_embedding.shape == (37, 32)
    assert "resized to 37 positions" in caplog.text
    grid = reference.image.encoder.positional_embedding[1:].reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
    expected = F.interpolate(grid, size=(6, 6), mode="bicubic", antialias=True).permute(0, 2, 3, 1).reshape(36, 32)
    assert torch.equal(ours.image.encoder.positional_embedding[1:], expected)
    assert features(ours, PIXELS.repeat(1, 1, 2, 2)[:, :, :48, :48])[0].isfinite().all()


def test_a_longer_context_has_interpolated_positions_and_is_exported(tmp_path: Path) -> None:
    reference = random_model(1)
    start = config(weights=str(custom(tmp_path, reference)), context_length=30)
    ours = build_model(start)
    old = reference.text.encoder.positional_embedding.detach()
    expected = F.interpolate(old.T[None], size=30, mode="linear")[0].T
    assert torch.equal(ours.text.encoder.positional_embedding, expected)
    assert ours.tokenizer(["word " * 20, "a red ring"]).shape == (2, 30)
    assert open_clip_description(ours, start)["model_cfg"]["text_cfg"]["context_length"] == 30
    save_model(tmp_path / "run", ours, start)
    again = build_model(completed_by_weights(ModelConfig(name="", weights=f"run:{tmp_path}/run")))
    assert torch.equal(again.text.encoder.positional_embedding, ours.text.encoder.positional_embedding)


def test_weights_that_do_not_fit_are_named_and_refused(tmp_path: Path) -> None:
    state = state_of(random_model(1))
    bias = state.pop("visual.ln_post.bias")
    for wrong, message in (
        ({"visual.extra": bias}, "1 missing, such as visual.ln_post.bias; 1 left over, such as visual.extra"),
        ({"visual.ln_post.bias": bias[1:]}, "size mismatch for visual.ln_post.bias"),
    ):
        torch.save(state | wrong, tmp_path / "w.pt")
        with pytest.raises(UserError, match=f"does not fit this architecture.*{message}"):
            build_model(config(weights=str(tmp_path / "w.pt")))


def test_a_bare_tower_may_lack_our_projection_and_have_a_classifier(tmp_path: Path) -> None:
    vision = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear"}
    tower = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    save_file({n: v.contiguous() for n, v in tower.state_dict().items()}, tmp_path / "w.safetensors")
    lit = config(architecture=SMALL | {"vision_cfg": vision}, image=TowerConfig(str(tmp_path / "w.safetensors")))
    trunk = build_model(lit).image.encoder.trunk
    assert torch.equal(trunk.blocks[0].attn.qkv.weight, tower.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("weights", ["laion2b_s34b_b79k", "hf-hub:laion/none"])
def test_weights_that_cannot_be_fetched_are_refused_with_a_remedy(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setattr("open_clip.download_pretrained", offline)
    with pytest.raises(UserError, match=r"cannot be fetched \(offline\); download it elsewhere"):
        find_source(weights, "ViT-B-32")


@pytest.mark.parametrize("weights", ["laion2b_s34b_b79k", "hf-hub:laion/none"])
def test_weights_that_come_slowly_have_a_line(weights: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def silent(*_: object, **__: object) -> str:
        time.sleep(1)
        raise OSError("offline")

    monkeypatch.setattr("clipscale.common.remote.ANNOUNCE_S", 0.05)
    monkeypatch.setattr("huggingface_hub.snapshot_download", silent)
    monkeypatch.setattr("open_clip.download_pretrained", silent)
    with pytest.raises(UserError, match="offline"):
        find_source(weights, "ViT-B-32")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"waiting for .*{weights.removeprefix('hf-hub:')}'?, which is fetched", line)


def test_a_tag_says_how_its_weights_were_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("open_clip.download_pretrained", lambda _: "nowhere")
    webli = find_source("webli", "ViT-B-16-SigLIP").model.preprocess
    assert webli["resize_mode"] == "squash" and webli["mean"] == HALF
