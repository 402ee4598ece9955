"""A first-time user's mistakes by their kind: each gets one line with what was typed and what to type instead."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clipscale.cli.main import main
from clipscale.common import files
from tests.cli.conftest import Cli, tiny
from tests.data.files import write_tar

MISTAKES = files.read_yaml(Path(__file__).with_name("mistakes.yaml"))


@pytest.mark.parametrize(("words", "wrong", "remedy"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line_that_names_the_remedy(cli: Cli, words: str, wrong: str, remedy: str) -> None:
    one_line(cli(*shlex.split(words)), wrong, remedy)


def one_line(answer: tuple[int, str, str], wrong: str, remedy: str) -> None:
    """Status 2 and one line, which names what is wrong, and then the remedy."""
    status, _, err = answer
    assert (status, err.count("\n"), "Traceback" in err) == (2, 1, False), err
    start, actual, rest = err.partition(wrong)
    assert start.startswith("error: ") and actual and remedy in (rest if wrong not in remedy else err), err


LATER = {
    # what only a look at the machine, the shards and the model shows
    "loss.backend=triton": "loss.backend=tiled",
    "cache.chunk=17": "1 to 16",
    "log=wandb": "wandb login",
    "run=taken/run": "run=PATH",
    # with a model
    "model.image_size=31": "30",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has Triton and CUDA")
@pytest.mark.parametrize("word", LATER)
def test_what_cannot_work_is_refused_before_a_step_and_mostly_before_a_model_is_built(
    cli: Cli, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    part = "train.Run.train_step" if word == "model.image_size=31" else "state.start.build_model"
    monkeypatch.setattr(f"clipscale.{part}", lambda *given: pytest.fail("too late"))
    monkeypatch.setattr("wandb.login", lambda **options: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    one_line(cli(*tiny(f"data.train={shards}", word)), word, LATER[word])


def test_a_batch_beyond_the_data_is_refused_from_its_counts(cli: Cli, shards: str) -> None:
    """In the words that were typed: 48 samples, and no length or some epochs."""
    words = [word for word in tiny(f"data.train={shards}", "batch=4k") if not word.startswith("samples=")]
    one_line(cli(*words), "batch=4096: the 48 samples in data.train make 1536", "32 epochs, the default")
    one_line(cli(*words, "epochs=2"), "batch=4096: the 48 samples in data.train make 96", "epochs=2")


def test_shards_of_which_nothing_is_usable_are_warned_of_at_once(cli: Cli, tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", [("a.img", b""), ("a.cap", b"")])
    _, _, err = cli(*(word for word in tiny(f"data.train={shard}", "batch=4k") if not word.startswith("samples=")))
    warning, refused = err.splitlines()
    assert ".cap and .img" in warning and "batch=4096" in refused, err


def test_under_torchrun_a_sweep_and_a_run_without_a_name_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    one_line(cli("train", "-m", "batch=32k,64k"), "-m", "leave torchrun out")
    one_line(cli("train", "data=demo"), "run", "run=NAME")


def test_help_and_mistakes_need_no_torch() -> None:
    """So that they are answered within a second."""
    asked = ("report", "train data=x.tar optim.name=", "train data=demo model.")  # the last: of the libraries
    typed = (shlex.split(words) for words, *_ in MISTAKES.values() if not words.startswith(asked))
    commands = [["train", "-h"], *typed]
    code = f"import sys; from {main.__module__} import main; [main(words) for words in {commands!r}]"
    code += "; sys.exit(bool({'torch', 'open_clip', 'torchvision', 'timm'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
