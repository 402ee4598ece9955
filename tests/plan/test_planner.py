"""`clipscale plan`: the conclusion, the limits, JSON, and the comparison with a run."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from clipscale.cli import compose
from clipscale.cli.main import main
from clipscale.common.hardware import hardware
from clipscale.config.tools import PlanConfig
from clipscale.models.towers import build_model
from clipscale.plan.memory import host_memory
from clipscale.plan.planner import plan
from clipscale.plan.step_time import caption_width, step_time
from tests.conftest import TINIEST, TINY
from tests.support.forks import forks
from tests.support.runs import ARCHITECTURE

PICTURES: Any = SimpleNamespace(row=(3, 30, 30), row_type=torch.uint8, context_length=28)
"""Stands for a dry run of model=tiny: the attributes that the host's memory depends on."""


def settings(*words: str) -> PlanConfig:
    _, overrides = compose.overrides("plan", words)
    config: PlanConfig = compose.resolved("plan", compose.values("plan", overrides))
    return config


def planned(*words: str) -> dict[str, Any]:
    return plan(settings(*words))


def in_folder(folder: Path, *words: str) -> None:
    """Runs a command; called in a separate process."""
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.exit(main(words))


def test_a_large_batch_of_a_small_model_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "batch=1M hardware=A800-80G gpus=8 cache.chunk=1k host_memory=1024G samples=32M"
    status = main(["plan", *TINIEST, *words.split()])
    out, err = capsys.readouterr()
    assert status == 0
    assert err.startswith("dry run of tiny on 8 x A800-80G") and err.count("\n") == 1
    assert "tiny, batch 1M: 131072 samples on each of 1 x 8 x A800-80G, in chunks of 1024" in out
    assert out.splitlines()[-1].startswith("fits: ")
    held = ("DDP buckets", "optimizer state", "encode", "replay", "shuffle windows")
    for word in (*held, "assumed, not measured", "hours for the run"):
        assert word in out, word


@pytest.mark.slow
def test_a_run_that_does_not_fit_gets_a_remedy_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        ["plan", "model=tiny", "batch=256k", "hardware=v100-16g", "cache.chunk=256k", "precision=fp32", "json=true"]
    )
    result = json.loads(capsys.readouterr().out)
    assert (status, result["fits"]) == (1, False)
    assert result["device"]["total_bytes"] > result["device"]["usable_bytes"]
    chunk = result["limits"]["chunk"]
    assert 256 <= chunk < 256 * 1024
    assert f"cache.chunk={chunk}" in result["conclusion"]
    assert [remedy["gpu_share"] for remedy in result["remedies"]] == sorted(r["gpu_share"] for r in result["remedies"])
    assert planned("model=tiny", "batch=256k", "hardware=v100-16g", f"cache.chunk={chunk}", "precision=fp32")["fits"]


@pytest.mark.slow
def test_a_loss_with_a_square_matrix_is_cured_by_another_loss_alone() -> None:
    """Checkpointing, FSDP2 and offloading do not shrink a B x B matrix, so they are not advised."""
    words = ("model=tiny", "batch=256k", "hardware=h100-80g", "gpus=8", "cache.chunk=256")
    result = planned(*words, "loss=clip")
    assert result["loss_bytes"] > result["device"]["usable_bytes"]
    assert [remedy["settings"] for remedy in result["remedies"]] == [["loss=infcl"]]
    assert f"; try loss=infcl, or batch={result['limits']['batch']}" in result["conclusion"]
    assert planned(*words, "loss=infcl")["fits"]


def test_the_main_figures_are_at_the_top_level_and_an_automatic_chunk_is_assumed() -> None:
    config = settings("batch=64k", "hardware=h100-80g")
    config.model.architecture = ARCHITECTURE
    result = plan(config)
    assert result["settings"]["chunk"] == {"image": 512, "text": 512}
    assert result["settings"]["chunk_assumed"]
    assert any("cache.chunk=auto: 512 assumed" in note for note in result["notes"])
    assert result["peak_bytes"] == result["device"]["peak_bytes"] > 0
    assert result["loss_bytes"] == result["device"]["phases"]["loss"]["extra_bytes"] > 0
    assert result["host_bytes"] == result["host"]["node_bytes"] > 0
    assert result["step_s"] == result["time"]["step_s"] > 0
    assert result["fits"] and "remedies" not in result


@pytest.mark.slow
def test_host_memory_bounds_the_batch() -> None:
    words = ("model=tiny", "batch=1M", "hardware=h100-80g", "cache.chunk=1k")
    result = planned(*words, "host_memory=5G")
    disk = host_memory(replace(settings(*words), offload="disk"), PICTURES, 2**20, 1024, cuda=True)
    assert (result["fits"], result["host"]["fits"]) == (False, False)
    assert result["host"]["process_bytes"]["batch"] > 2 * 2**20 * 3 * 30 * 30
    assert "; try offload=disk, or batch=" in result["conclusion"], (
        "encoded pictures of 40 kB are larger than these pixels"
    )
    assert result["limits"]["batch_bound"] == "host memory"
    assert result["limits"]["batch"] < 2**20
    assert disk["node_bytes"] < 5 * 2**30
    assert disk["disk_bytes"] == 2 * 2**20 * 3 * 30 * 30


@pytest.mark.slow
def test_memory_grows_with_the_batch_by_its_features_alone() -> None:
    small, large = (
        planned("model=tiny", f"batch={batch}", "hardware=h100-80g", "cache.chunk=4k") for batch in ("32k", "1M")
    )
    per_sample = 2 * 2 * 128 * 4  # features and their gradients
    for phase in ("encode", "replay"):
        grown = large["device"]["phases"][phase]["peak_bytes"] - small["device"]["phases"][phase]["peak_bytes"]
        assert 0 < grown <= per_sample * (2**20 - 2**15), phase
    assert large["device"]["phases"]["optim"] == small["device"]["phases"]["optim"]


def test_a_run_is_compared_with_its_prediction(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU only the host's memory is compared; then GPU figures are written into the same files."""
    monkeypatch.chdir(tmp_path)
    trained = forks().Process(
        target=in_folder,
        args=(tmp_path, "train", *TINY, f"data.train={shards}", "samples=48", "run=small", "log.every=1"),
    )
    trained.start()
    trained.join(120)
    assert trained.exitcode == 0
    folder = tmp_path / "runs" / "small"
    assert main(["plan", "run=small", "json=true"]) == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert compared["peak"]["measured_bytes"] is compared["peak"]["ratio"] is None
    assert compared["host"]["ratio"] > 1, (
        "a fork shares what it was forked from; tests/cli/test_main.py has a process of its own"
    )

    env = json.loads((folder / "env.json").read_text()) | {"gpus": ["NVIDIA H100 80GB HBM3"]}
    (folder / "env.json").write_text(json.dumps(env))
    values = yaml.safe_load((folder / "config.yaml").read_text()) | {"device": "cuda"}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 3, "mem_peak_bytes": 10_000_000}) + "\n")
    assert main(["plan", f"run={folder}", "json=true"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["hardware"], result["gpus"], result["steps"]) == ("h100-80g", 1, 3)
    peak = result["compared"]["peak"]
    assert peak["ratio"] == peak["predicted_bytes"] / 10_000_000
    assert result["largest_error"] == abs(peak["ratio"] - 1)


def test_a_step_of_short_captions_is_shorter() -> None:
    """Sorted captions are computed at their own width, about 24 tokens instead of 28."""
    config = settings("model=tiny", "batch=64k", "hardware=h100-80g")
    trained = [SimpleNamespace(trained=True)] * 2
    state = SimpleNamespace(model=build_model(config.model), stored=None, cache=SimpleNamespace(towers=trained))
    run: Any = SimpleNamespace(state=state, context_length=28, width=128, gradient_bytes=lambda: 0)
    short = step_time(config, hardware("h100-80g"), run, 64, (0, 0))
    assert caption_width(config, run) == 24
    config.data.sort_captions = False
    assert caption_width(config, run) == 28
    assert short.step < step_time(config, hardware("h100-80g"), run, 64, (0, 0)).step
