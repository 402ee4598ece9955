"""What a shell completes, by the same tables as help and checks; and that the shells do."""

import shutil
from pathlib import Path

import pytest

from clipscale.cli.verbs import VERBS
from clipscale.common import files
from clipscale.config.presets import group_options
from tests.cli.conftest import Cli
from tests.support.terminals import on_terminal, plain


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two runs, one of which has begun, a file and a folder."""
    monkeypatch.chdir(tmp_path)
    for path in ("runs/mine", "my data/.hidden"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "runs/demo").mkdir()
    for path in ("my.tar", "runs/demo/config.yaml"):
        (tmp_path / path).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", [*dict.fromkeys(name.split()[0] for name in VERBS)]),
        ("train experiment=", [f"experiment={name}" for name in group_options()["experiment"]]),
        *files.read_yaml(Path(__file__).with_name("completion.yaml")).items(),
    ],
)
def test_the_completions_of_a_line(folder: Path, cli: Cli, line: str, found: list[str]) -> None:
    assert cli("completion", "bash", f" {line}")[1].split() == found


TYPED = "clipscale train model=vit-b32-q"


@pytest.mark.parametrize("shell", ["bash --norc -i", "zsh -f -i"])
def test_a_shell_completes_what_is_typed(folder: Path, environment: dict[str, str], shell: str) -> None:
    """A preset after its key, and a path with a blank, which is quoted."""
    name = shell.split()[0]
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    script = f'PS1=; eval "$(clipscale completion {name})"; echo rea"dy"\r'
    paths = ("uickgelu", "\x15clipscale data check my\\ d\t")
    status, output = on_terminal(
        shell.split(), folder, environment, ("", script), ("ready", f"{TYPED}\t"), paths, ("ata/", "\x15exit\r")
    )
    assert not status and "vit-b32-quickgelu" in plain(output), output


def test_an_unknown_shell_is_a_mistake(cli: Cli) -> None:
    status, _, err = cli("completion", "tcsh")
    assert status == 2 and "completion tcsh: give a shell, bash, zsh or fish" in err
