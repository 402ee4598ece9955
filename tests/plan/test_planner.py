"""`clipscale plan`: the conclusion, remedies, JSON, and the comparison with a run."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clipscale.cli import compose
from clipscale.cli.main import main
from clipscale.plan.planner import plan
from tests.conftest import TINIEST, TINY
from tests.support.forks import forks


def planned(words: str) -> dict[str, Any]:
    _, overrides = compose.overrides("plan", words.split())
    return plan(compose.settings("plan", overrides))


def in_folder(folder: Path, *words: str) -> None:
    """Runs a command; called in a separate process."""
    os.chdir(folder)
    sys.exit(main(words))


def test_a_large_batch_of_a_small_model_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "batch=1M hardware=A800-80G gpus=8 cache.chunk=1k host_memory=1024G samples=32M"
    status = main(["plan", *TINIEST, *words.split()])
    out, err = capsys.readouterr()
    assert status == 0
    assert err.startswith("dry run of tiny on 8 x A800-80G") and err.count("\n") == 1
    assert "tiny, batch 1M: 131072 samples on each of 1 x 8 x A800-80G, in chunks of 1024 images and 1024 texts" in out
    assert out.splitlines()[-1].startswith("fits: ")
    for word in ("encode", "replay", "shuffle windows", "assumed, not measured", "hours for the run"):
        assert word in out, word


def test_host_memory_that_nobody_limits_is_said_to_be_unchecked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["batch=1M", "hardware=h100-80g", "gpus=8", "cache.chunk=1k", "eval.every=0"]
    assert main(["plan", *TINIEST, *words, "eval.sets=[somewhere]"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last.startswith("fits the GPUs: ") and "of host memory on each node, which are needed and not checked" in last
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("batch=256k hardware=v100-16g cache.chunk=256k precision=fp32", "cache.chunk"),
        ("batch=256k hardware=h100-80g gpus=8 cache.chunk=256 loss=clip", "loss.backend"),
        ("batch=1M hardware=h100-80g cache.chunk=1k host_memory=5G", "offload"),
        ("batch=64k hardware=v100-16g cache.chunk=256 cache.keep=20G precision=fp32", "cache.keep"),
    ],
)
def test_a_run_that_does_not_fit_gets_remedies_that_fit(
    words: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *f"model=tiny json=true {words}".split()]) == 1
    result = json.loads(capsys.readouterr().out)
    remedies = [" ".join(found["settings"]) for found in result["remedies"]]
    assert any(settings.startswith(remedy) for settings in remedies), remedies
    assert f"; try {remedies[0]}" in result["conclusion"]
    assert ("or batch=" in result["conclusion"]) == (result["limits"]["batch"] > 0)
    kept = [word for word in words.split() if not word.startswith(remedy)]
    assert planned(" ".join(["model=tiny", *kept, remedies[0]]))["fits"]


def test_an_automatic_chunk_is_assumed() -> None:
    result = planned(" ".join((*TINIEST, "batch=64k hardware=h100-80g")))
    assert result["chunk"] == {"image": 512, "text": 512}
    assert result["fits"] and "remedies" not in result
    assert result["limits"]["batch"] > 2**16 and result["limits"]["chunk"] == 512
    assert result["device"]["phases"]["loss"]["extra_bytes"] > 0 and result["time"]["step_s"] > 0


def test_a_run_is_compared_with_its_prediction(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU only the host's memory is compared; then GPU figures are written into the same files."""
    monkeypatch.chdir(tmp_path)
    tiny = [word for word in TINY if not word.startswith("samples=")]
    words = (*tiny, f"data.train={shards}", "samples=48", "run=small", "log.every=1")
    trained = forks().Process(target=in_folder, args=(tmp_path, "train", *words))
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
