"""The trainer's state comes back from a checkpoint bit for bit, from today's format and from the one before."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from clipscale import checkpoint
from clipscale.config.sections import (
    CacheConfig,
    CheckpointConfig,
    LaunchConfig,
    LogConfig,
    OptimConfig,
    PrecisionConfig,
    RampConfig,
)
from clipscale.config.train import TrainConfig
from clipscale.distributed.world import World
from clipscale.models.towers import build_model
from clipscale.state import empty_model, train_state
from clipscale.train import train
from tests.models.test_weights import open_clip_folder
from tests.support.ranks import run_ranks
from tests.support.runs import BF16, on_a_rank, records, small


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("adafactorbv", BF16),
        pytest.param("muon", PrecisionConfig(), marks=pytest.mark.slow),
        pytest.param("muon", BF16, marks=pytest.mark.slow),
        pytest.param("adafactorbv", PrecisionConfig(), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_with_the_same_weights_and_optimizer(
    shards: str, tmp_path: Path, name: str, precision: PrecisionConfig
) -> None:
    settings: dict[str, Any] = {"optim": OptimConfig(name=name, lr=1e-3, eps=None), "precision": precision}
    train(small(shards, tmp_path / "whole", checkpoint=CheckpointConfig(every=2, keep=0), **settings))
    middle = checkpoint.path_of(tmp_path / "whole", 2)
    train(small(shards, tmp_path / "parts", resume=str(middle), **settings))
    assert [r["loss"] for r in records(tmp_path / "parts")] == [r["loss"] for r in records(tmp_path / "whole")][2:]
    whole, parts = (checkpoint.load(checkpoint.path_of(tmp_path / run, 4)) for run in ("whole", "parts"))
    assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())
    torch.testing.assert_close(parts["optimizer"]["state"], whole["optimizer"]["state"], rtol=0, atol=0)
    assert parts["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]


def test_weights_for_the_host_have_their_masters_there_too() -> None:
    with FakeTensorMode(), patch("torch.cuda.is_available", lambda: True):
        copies = {"weight": torch.empty(2, 2, device="cuda")}
        state = SimpleNamespace(model=torch.nn.Linear(2, 2), masters={"image": SimpleNamespace(copies=copies)})
        for options, device in ((None, "cuda"), (StateDictOptions(cpu_offload=True), "cpu")):
            found = train_state.TrainState.weights(state, options)  # type: ignore[arg-type]
            assert found["image.weight"].device.type == device


def built(rank: int, world: int, config: TrainConfig) -> dict[str, Any]:
    """The whole weights of a new run, and where this rank has built the model."""
    seen: list[str] = []
    with patch.object(
        empty_model, "build_model", lambda c: seen.append(str(torch.get_default_device())) or build_model(c)
    ):
        state = train_state.TrainState(config, World(rank, world, torch.device("cpu")), Path(config.run), None)
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in empty_model.tensors_of(state.model)}
    return {"seen": seen, "weights": {name: tensor.detach() for name, tensor in whole.items()}}


def test_fsdp_builds_the_model_without_memory(shards: str, tmp_path: Path) -> None:
    """Rank 0 has it in host memory for a moment; every rank ends with the bits of one process."""
    model = replace(small(shards, tmp_path).model, freeze_image=True)
    config = small(
        shards,
        tmp_path,
        precision=PrecisionConfig("bf16"),
        model=model,
        launch=LaunchConfig(parallel="fsdp"),
    )
    ranks = run_ranks(built, 2, config)
    alone = built(0, 1, config)["weights"]
    assert [rank["seen"] for rank in ranks] == [["meta", "cpu"], ["meta"]]
    for rank in ranks:
        assert all(torch.equal(value, rank["weights"][name]) for name, value in alone.items())
        assert alone.keys() == rank["weights"].keys()


def test_a_sharded_run_writes_whole_tensors_that_one_process_reads(shards: str, tmp_path: Path) -> None:
    fsdp = LaunchConfig(parallel="fsdp")
    run_ranks(on_a_rank, 2, small(shards, tmp_path / "run", samples=24, precision=PrecisionConfig(), launch=fsdp))
    train(small(shards, tmp_path / "one", samples=24, precision=PrecisionConfig()))
    found, wanted = (checkpoint.load(checkpoint.path_of(tmp_path / run, 2)) for run in ("run", "one"))
    torch.testing.assert_close(found["model"], wanted["model"], rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(found["optimizer"]["state"], wanted["optimizer"]["state"], rtol=1e-2, atol=1e-4)
    train(small(shards, tmp_path / "run", precision=PrecisionConfig()))
    assert len(records(tmp_path / "run")) == 4


def test_a_run_normalises_as_its_weights_were_trained_and_goes_on_so(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SigLIP's mean of 0.5 is in its folder's description, and not in the settings."""

    half = (0.5, 0.5, 0.5)

    def run(name: str, resume: str = "auto", **changes: Any) -> list[float]:
        every = CheckpointConfig(every=1, keep=0)
        config = small(
            shards, tmp_path / name, samples=24, precision=PrecisionConfig(), checkpoint=every, resume=resume
        )
        train(replace(config, model=replace(config.model, **changes)))
        return [r["loss"] for r in records(tmp_path / name)]

    model = small(shards, tmp_path).model
    folder = open_clip_folder(tmp_path / "weights", build_model(model), model.architecture)
    wanted = run("named", weights=str(folder / "open_clip_model.safetensors"), mean=half, std=half)
    capsys.readouterr()
    assert run("described", weights=str(folder)) == wanted
    assert "mean [0.5, 0.5, 0.5], deviation [0.5, 0.5, 0.5]" in capsys.readouterr().out
    first = checkpoint.path_of(tmp_path / "described", 1)
    assert tuple(checkpoint.load(first)["model_config"]["mean"]) == half
    assert (tmp_path / "described/config.yaml").read_text().count("0.5") >= 6
    capsys.readouterr()
    assert run("described", weights=str(folder)) == wanted
    assert "going on after step" in (out := capsys.readouterr().out) and "changed" not in out
    assert run("resumed", resume=str(first)) == wanted[1:], "without the weights, as its checkpoint says"


def test_captions_are_sorted_and_a_step_that_measures_noise_leaves_them(shards: str, tmp_path: Path) -> None:
    log = LogConfig(noise_scale=2, report=False)
    whole = small(shards, tmp_path / "given", precision=PrecisionConfig(), log=log)
    context = whole.model.architecture["text_cfg"]["context_length"]
    train(replace(whole, data=replace(whole.data, sort_captions=False)))
    train(replace(whole, run=str(tmp_path / "sorted")))
    given, found = records(tmp_path / "given"), records(tmp_path / "sorted")
    assert {r["caption_tokens"] for r in given} == {context}
    assert [r["caption_tokens"] < context for r in found] == [True, False, True, False]
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in given], rel=1e-5)
    assert [r["noise_trace"] for r in found[1::2]] == pytest.approx([r["noise_trace"] for r in given[1::2]], rel=1e-3)
    assert checkpoint.load(checkpoint.path_of(tmp_path / "sorted", 4))["sort_captions"] is True


@pytest.mark.slow
@pytest.mark.timeout(1500)  # compiling
@pytest.mark.parametrize("part", ["keep", "ramp", "compile"])
def test_sorted_captions_change_no_curve_whatever_else_a_run_does(shards: str, tmp_path: Path, part: str) -> None:
    changes: dict[str, Any] = {
        "keep": {"cache": CacheConfig(image_chunk=4, text_chunk=6, keep="400k")},
        "ramp": {"ramp": RampConfig(4, 24)},
        "compile": {"model": replace(small(shards, tmp_path).model, compile=True)},
    }[part]
    for name, sort in (("given", False), ("sorted", True)):
        config = small(shards, tmp_path / name, precision=PrecisionConfig(), **changes)
        train(replace(config, data=replace(config.data, sort_captions=sort)))
    given, found = records(tmp_path / "given"), records(tmp_path / "sorted")
    assert all(a["caption_tokens"] > b["caption_tokens"] for a, b in zip(given, found, strict=True))
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in given], rel=1e-4)
    assert [r["batch"] for r in found] == [r["batch"] for r in given]
