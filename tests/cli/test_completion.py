"""Tab completion of words, keys and values, in Python and in the shells themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest

from clipscale.cli.completion import complete
from clipscale.common.hardware import HARDWARE
from clipscale.config.presets import group_options


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
        ("clipscale data ", ["check", "demo", "index", "stats"]),
        ("clipscale bench loss me", ["methods="]),
        ("clipscale plan hardware=h", ["hardware=h100-80g", "hardware=h200-141g", "hardware=h800-80g"]),
        ("clipscale train offload=", ["offload=disk", "offload=encoded", "offload=host", "offload=none"]),
        ("clipscale train optim.lr_scaling=s", ["optim.lr_scaling=sqrt"]),
        ("clipscale eval prec", ["precision.", "precision="]),
        ("clipscale completion ", ["bash", "fish", "zsh"]),
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
    assert complete("clipscale explore against=b1") == ["against=b16"]
    assert complete("clipscale doctor run=") == []


def test_every_gpu_of_the_table_is_offered() -> None:
    assert set(complete("clipscale plan hardware=")) == {f"hardware={name}" for name in [*HARDWARE, "cpu"]}


LINES = [
    ("clipscale tra", ["train"]),
    pytest.param("clipscale plan hardware=h2", ["hardware=h200-141g"], marks=pytest.mark.slow),
    ("clipscale train model=rn", ["model=rn50"]),
    pytest.param(
        "clipscale train model=", [f"model={name}" for name in group_options()["model"]], marks=pytest.mark.slow
    ),
    ("clipscale train data.train=/usr/sh", []),
]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_bash_completes(environment: dict[str, str], line: str, expected: list[str]) -> None:
    """Bash splits words at spaces and around `=`; its candidates are what follows the `=`."""
    program = f"""
        eval "$(clipscale completion bash)"
        complete -p clipscale >/dev/null || exit 3
        compopt() {{ :; }}
        COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}
        read -ra COMP_WORDS <<< "${{COMP_LINE//=/ = }}"
        COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _clipscale
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    assert shell("bash", program, environment) == [candidate.rpartition("=")[2] for candidate in expected]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_zsh_completes(environment: dict[str, str], line: str, expected: list[str]) -> None:
    """The functions of zsh's completion system are replaced by ones that print: `files` where it would offer file names."""
    program = f"""
        compdef() {{ [[ "$1 $2" == "_clipscale clipscale" ]] || exit 3 }}
        compadd() {{ while [[ $1 != -- ]]; do shift; done; shift; (( $# )) && print -l -- $@ }}
        compset() {{ :; }}
        _files() {{ print files }}
        eval "$(clipscale completion zsh)"
        words=(${{=:-{line}}}); CURRENT=$#words; PREFIX=$words[CURRENT]
        _clipscale
    """
    assert shell("zsh", program, environment) == (expected or ["files"])


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_fish_completes(environment: dict[str, str], line: str, expected: list[str]) -> None:
    """`complete -C` asks fish for the candidates of a line. Without any, fish offers files: here the folder `/usr/share`."""
    program = f"clipscale completion fish | source; complete -C {line!r}"
    found = [candidate.split("\t")[0] for candidate in shell("fish", program, environment)]
    assert found == (expected or ["data.train=/usr/share/"])


def shell(name: str, program: str, environment: dict[str, str]) -> list[str]:
    """The lines that a program prints in a shell without startup files."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    plain = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[name]
    done = subprocess.run([name, *plain, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line]
