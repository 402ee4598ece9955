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
    """The present folder, with three runs, two of which have begun, a file and a folder."""
    monkeypatch.chdir(tmp_path)
    for path in ("runs/mine", "my data/.hidden"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("runs/demo", "runs/my run"):
        (tmp_path / path).mkdir()
    for path in ("my.tar", "runs/demo/config.yaml", "runs/my run/config.yaml"):
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
    assert cli("completion", "bash", f" {line}")[1].splitlines() == found


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_shells_that_quote_what_they_insert_get_names_as_they_are(folder: Path, cli: Cli, shell: str) -> None:
    assert cli("completion", shell, " eval run=my\\ ")[1] == "run=my run\n"


TYPED = "clipscale train model=vit-b32-q"


@pytest.mark.parametrize("shell", ["bash --norc -i", "zsh -f -i"])
def test_a_shell_completes_what_is_typed(folder: Path, environment: dict[str, str], shell: str) -> None:
    """It completes a preset after its key, and a path and a run with a blank, which it quotes."""
    name = shell.split()[0]
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    script = f'PS1=; eval "$(clipscale completion {name})"; echo rea"dy"\r'
    paths = ("uickgelu", "\x15clipscale data check my\\ d\t")
    run = ("ata/", "\x15clipscale eval run=m\t")
    device = ("run=my\\\\ run", "\x15clipscale plan hardware=a800\t")
    status, output = on_terminal(
        shell.split(), folder, environment, ("", script), ("ready", f"{TYPED}\t"), paths, run, device,
        ("-80g", "\x15exit\r")
    )  # fmt: skip
    assert not status and "vit-b32-quickgelu" in plain(output), output


def test_an_unknown_shell_is_a_mistake(cli: Cli) -> None:
    status, _, err = cli("completion", "tcsh")
    assert status == 2 and "completion tcsh: give a shell, bash, zsh or fish" in err
