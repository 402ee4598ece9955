"""A configuration file chooses values; it starts no code, whichever of Hydra's ways to code it takes."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from clipscale.cli import received
from clipscale.cli.main import main
from clipscale.common.errors import UserError
from tests.conftest import TINY, Command

TARGETS = {
    "callback": {"callbacks": {"x": {"_target_": "os.mkdir", "path": "{ran}"}}},
    "nested": {"callbacks": {"x": {"y": [{"_target_": "os.mkdir", "path": "{ran}"}]}}},
    "ours": {"callbacks": {"x": {"_target_": "clipscale.data.shards.store.Pipe", "command": "touch {ran}"}}},
    "harmless": {"callbacks": {"x": {"_target_": "hydra.experimental.callback.Callback"}}},
    "launcher": {"launcher": {"_target_": "os.getcwd"}},
    "sweeper": {"sweeper": {"_target_": "os.getcwd"}},
    "argument": {"sweeper": {"params": {"x": {"_target_": "os.mkdir", "path": "{ran}"}}}},
    "job logging": {"job_logging": {"version": 1, "root": {}, "handlers": {"x": {"()": "os.mkdir", "path": "{ran}"}}}},
    "logging": {"hydra_logging": {"version": 1, "root": {}, "handlers": {"x": {"()": "os.mkdir", "path": "{ran}"}}}},
    "environment": {"job": {"env_set": {"LD_PRELOAD": "{ran}"}}},
}


def written(folder: Path, values: dict[str, object]) -> list[str]:
    """An experiment of a stranger in `folder`, and the words that choose it."""
    (folder / "experiment").mkdir()
    text = json.dumps(values).replace("{ran}", str(folder / "ran"))
    (folder / "experiment/received.yaml").write_text("# @package _global_\n" + yaml.safe_dump(json.loads(text)))
    return ["--config-dir", str(folder), "experiment=received", *TINY, "data.train=/nowhere/0.tar", "run=r"]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "sweep", [pytest.param((), id="run"), pytest.param(("-m", "seed=0,1"), id="sweep", marks=pytest.mark.slow)]
)
def test_a_received_experiment_starts_no_code(
    name: str,
    sweep: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = written(tmp_path, {"hydra": TARGETS[name]})
    assert main(["train", *words, *sweep]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: hydra.") and errors.count("\n") == 1, errors
    assert not (tmp_path / "ran").exists()


def test_a_received_experiment_does_not_allow_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = written(tmp_path, {"data": {"train": f"pipe:touch {tmp_path}/ran", "allow_pipe": True}})
    words.remove("data.train=/nowhere/0.tar")
    assert main(["train", *words]) == 2
    assert "data.allow_pipe" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", received.TYPED)
def test_what_runs_code_is_given_as_an_argument_alone(name: str) -> None:
    config = OmegaConf.create({"hydra": {}})
    OmegaConf.update(config, name, "x", force_add=True)
    with pytest.raises(UserError, match=f"{name} may not be set by a file"):
        received.refuse(config, ["batch=16", f"x{name}=x"])
    received.refuse(config, [f"+{name}=x"])


@pytest.mark.slow
def test_a_sweep_with_hydras_own_launcher_works(command: Command, shards: str) -> None:
    done = command("train", *TINY, f"data.train={shards}", "-m", "seed=0,1", "run=s", "hydra/launcher=basic")
    assert done.returncode == 0, done.stderr
