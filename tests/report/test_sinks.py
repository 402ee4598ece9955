"""The key for wandb goes to the host that the user's own configuration names, whatever lies in the working directory."""

from pathlib import Path

import pytest

from clipscale.common.errors import UserError
from clipscale.report.sinks import DEFAULT_HOST, refuse_foreign_settings, wandb_host


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def write(folder: Path, *lines: str, name: str = "wandb") -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "settings").write_text("\n".join(["[default]", *lines]))
    return folder


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
@pytest.mark.parametrize(
    "line",
    [
        "base_url = https://stranger.example",
        "https_proxy = http://stranger",
        "x_extra_http_headers = {}",
        "api_key = x",
    ],
)
def test_settings_of_a_folder_that_concern_the_key_are_refused(tmp_path: Path, name: str, line: str) -> None:
    folder = write(tmp_path / "work", "project = p", line, name=name)
    with pytest.raises(UserError, match=line.split()[0]):
        refuse_foreign_settings(folder, wandb_host())


@pytest.mark.parametrize("text", ["no section", "[default", "[default]\nx", "\ud800", "[default]\na=1\na=2"])
def test_damaged_settings_are_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "work")
    (tmp_path / "work/wandb/settings").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="cannot be read"):
        refuse_foreign_settings(tmp_path / "work", DEFAULT_HOST)


def test_names_and_the_users_own_host_are_accepted(tmp_path: Path, home: Path) -> None:
    (home / "settings").write_text("[default]\nbase_url = https://own.example/\n")
    assert wandb_host() == "https://own.example"
    refuse_foreign_settings(
        write(tmp_path / "work", "entity = e", "project = p", "base_url = https://own.example"), wandb_host()
    )
    refuse_foreign_settings(tmp_path / "empty", wandb_host())


def test_the_variable_counts_before_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_host() == DEFAULT_HOST
    (home / "settings").write_text("[default]\nbase_url = https://file.example\n")
    monkeypatch.setenv("WANDB_BASE_URL", "https://variable.example")
    assert wandb_host() == "https://variable.example"


def test_a_run_beside_foreign_settings_goes_on_without_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clipscale.config.sections import LogConfig
    from clipscale.report.metrics import MetricLog

    monkeypatch.chdir(write(tmp_path / "work", "base_url = https://stranger.example"))
    with MetricLog(
        tmp_path / "run", LogConfig(wandb="online", tensorboard=False, progress=False), resolved_config="{}"
    ) as log:
        log.step({"step": 1, "loss": 1.0})
    assert "wandb failed and is off" in capsys.readouterr().out
