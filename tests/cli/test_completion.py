"""Tab completion: words, keys and what they may be; in Python and in bash itself."""

import subprocess
from pathlib import Path

import pytest

from clipscale.cli.completion import complete
from clipscale.config.presets import group_options
from clipscale.hardware import HARDWARE


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("clipscale tr", ["train"]),
        ("clipscale train mod", ["model.", "model="]),
        ("clipscale train model=vit-b", ["model=vit-b16", "model=vit-b32"]),
        ("clipscale train -m model=tiny,vit-l", ["model=tiny,vit-l14"]),
        ("clipscale train batch=1M optim.l", ["optim.lr=", "optim.lr_scaling="]),
        ("clipscale train model.compile=t", ["model.compile=true"]),
        ("clipscale train data.train=/tm", []),
        ("clipscale train --multi", ["--multirun"]),
        ("clipscale data ", ["check", "demo", "features", "index", "stats"]),
        ("clipscale data demo se", ["seed="]),
        ("clipscale bench ", ["data", "loss", "step"]),
        ("clipscale bench loss me", ["methods="]),
        ("clipscale eval ch", ["checkpoint="]),
        ("clipscale report r", ["run="]),
        ("clipscale plan model=vit-l", ["model=vit-l14"]),
        ("clipscale plan hard", ["hardware="]),
        ("clipscale plan cache.ch", ["cache.chunk="]),
        ("clipscale plan hardware=h", ["hardware=h100-80g", "hardware=h200-141g", "hardware=h800-80g"]),
        ("clipscale plan json=", ["json=false", "json=true"]),
        ("clipscale train offload=", ["offload=disk", "offload=encoded", "offload=host", "offload=none"]),
        ("clipscale train optim.lr_scaling=s", ["optim.lr_scaling=sqrt"]),
        ("clipscale train precision.name=b", ["precision.name=bf16"]),
        ("clipscale eval prec", ["precision.", "precision="]),
        ("clipscale eval device=c", ["device=cpu", "device=cuda"]),
        ("clipscale eval model=", []),
        ("clipscale data features model=vit-h", ["model=vit-h14"]),
        ("clipscale data check filter.k", ["filter.keep_missing="]),
        ("clipscale bench step model=vit-h", ["model=vit-h14"]),
        ("clipscale bench los m", []),
        ("clipscale nothing m", []),
    ],
)
def test_the_last_word_is_completed(line: str, candidates: list[str]) -> None:
    assert complete(line) == candidates


@pytest.mark.parametrize("verb", ["train", "eval", "plan", "report", "export"])
def test_runs_are_offered_by_name_and_those_of_a_sweep_by_path(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete(f"clipscale {verb} run=") == []
    for name in ("b16", "b32", "sizes/batch=1k", "sizes/batch=2k"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs/bench").mkdir()
    assert complete(f"clipscale {verb} run=") == [
        f"run={name}" for name in ("b16", "b32", "runs/sizes/batch=1k", "runs/sizes/batch=2k")
    ]
    assert complete(f"clipscale {verb} run=b1") == ["run=b16"]
    assert complete("clipscale doctor run=") == []


def test_every_gpu_of_the_table_is_offered() -> None:
    assert set(complete("clipscale plan hardware=")) == {f"hardware={name}" for name in [*HARDWARE, "cpu"]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("clipscale tra", ["train"]),
        ("clipscale plan hardware=h2", ["h200-141g"]),
        ("clipscale train model=rn", ["rn50"]),
        ("clipscale train model=", group_options()["model"]),
        ("clipscale train data.train=/usr/sh", []),
    ],
)
def test_bash_completes_with_the_script_that_completion_prints(
    environment: dict[str, str], line: str, expected: list[str]
) -> None:
    """Bash splits the words as readline does, at spaces and around `=`, and shows what COMPREPLY holds."""
    program = f"""
        eval "$(clipscale completion bash)"
        complete -p clipscale >/dev/null || exit 3
        compopt() {{ :; }}
        COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}
        read -ra COMP_WORDS <<< "${{COMP_LINE//=/ = }}"
        COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _clipscale
        printf '%s:' "${{#COMPREPLY[@]}}" "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split(":")[:-1] == [str(len(expected)), *expected]
