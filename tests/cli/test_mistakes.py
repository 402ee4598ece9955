"""A first-time user's mistakes by their kind: each gets one line with what was typed and what to type instead."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from clipscale.common import files
from tests.cli.conftest import Cli, tiny
from tests.conftest import shared
from tests.data.files import sample, write_tar
from tests.support.interpreter import interpreted

ROOT = Path(__file__).parents[2]
MISTAKES = files.read_yaml(Path(__file__).with_name("mistakes.yaml"))


ANSWER = f"""\
import gc, json, sys
gc.disable()  # it ends soon
sys.path.insert(0, {str(ROOT)!r})
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from clipscale.cli import compose
from clipscale.cli.main import main
typed, is_fast = json.load(sys.stdin)
if is_fast:
    from tests.support.composing import compose_once
    compose.compose_config = compose_once
for words in (["train", "-h"], *typed):
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(words)
    heavy = {{"torch", "open_clip", "torchvision", "timm"}} & {{*sys.modules}}
    print(json.dumps([status, out.getvalue(), err.getvalue(), [*heavy]]))
"""


def typed(mistakes: Sequence[str], folder: Path, *, is_fast: bool) -> list[list]:
    """The answers to mistakes that one process types in a folder: status, stdout, stderr, and the modules loaded by
    then. `is_fast`: Hydra composes each choice of presets once."""
    given = json.dumps([[shlex.split(words) for words in mistakes], is_fast])
    done = subprocess.run([sys.executable, "-c", ANSWER], input=given, cwd=folder, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()[1:]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """The answers to the mistakes of the tests that run, by their words."""
    tests = [item for item in request.session.items if "answers" in getattr(item, "fixturenames", ())]
    mistakes = [item.callspec.params["words"] for item in tests if isinstance(item, pytest.Function)]

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "answers.json").write_text(json.dumps(typed(mistakes, folder, is_fast=True)))

    lines = json.loads((shared(tmp_path_factory, "mistakes", make) / "answers.json").read_text())
    return dict(zip(mistakes, lines, strict=True))


CASES = [
    pytest.param(*case[:3], id=kind, marks=[getattr(pytest.mark, mark) for mark in case[3:]])
    for kind, case in MISTAKES.items()
]


@pytest.mark.long
@pytest.mark.parametrize(("words", "wrong", "remedy"), CASES)
def test_a_mistake_is_answered_in_one_line_that_names_the_remedy(
    answers: dict[str, list], words: str, wrong: str, remedy: str
) -> None:
    """The answer needs no torch, which takes seconds."""
    *answer, loaded = answers[words]
    one_line(tuple(answer), wrong, remedy)
    assert not loaded


@pytest.mark.slow  # the test above composes presets once, and sets the words in them
def test_hydra_itself_answers_all_mistakes_alike(tmp_path: Path) -> None:
    cases = [case[:3] for case in MISTAKES.values()]
    answers = typed([words for words, _, _ in cases], tmp_path, is_fast=False)
    for (_, wrong, remedy), (*answer, loaded) in zip(cases, answers, strict=True):
        one_line(tuple(answer), wrong, remedy)
        assert not loaded


def test_a_test_set_that_is_not_there_is_answered_before_numpy_is_loaded() -> None:
    """torch and Pillow are not loaded either, so the answer comes in a second."""
    code = (
        "import sys; from clipscale.cli.main import main; status = main(['train', 'data=demo', 'eval.sets=[/missing]'])"
    )
    done = interpreted(f"{code}; print(status, *{{'torch', 'numpy', 'PIL'}} & {{*sys.modules}})")
    assert done.stdout == "2\n" and "eval.sets: /missing does not exist" in done.stderr


def one_line(answer: tuple[int, str, str], wrong: str, remedy: str) -> None:
    """Assert status 2 and one line, which names the mistake and then the remedy."""
    status, _, err = answer
    assert (status, err.count("\n"), "Traceback" in err) == (2, 1, False), err
    start, actual, rest = err.partition(wrong)
    assert start.startswith("error: ") and actual and remedy in (rest if wrong not in remedy else err), err


LATER = {
    # what only a look at the machine, the shards and the model shows
    "loss.backend=triton": "loss.backend=tiled",
    "cache.chunk=17": "1 to 16",
    "log=wandb": "wandb login",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has Triton and CUDA")
@pytest.mark.parametrize("word", LATER)
def test_what_cannot_work_is_refused_before_a_model_is_built(
    cli: Cli, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setattr("clipscale.start.build.build_model", lambda *given: pytest.fail("too late"))
    monkeypatch.setattr("wandb.login", lambda **options: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("WANDB_MODE")
    one_line(cli(*tiny(f"data.train={shards}", word)), word, LATER[word])


def test_wandb_needs_a_key_only_where_the_environment_lets_it_ask(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandb.login", lambda **options: False)
    words = tiny(f"data.train={shards}", "--cfg", "job")
    for mode, log, status in (
        ("offline", "wandb", 0), ("disabled", "wandb", 0), ("online", "wandb-offline", 2), ("online", "default", 0)
    ):  # fmt: skip
        monkeypatch.setenv("WANDB_MODE", mode)
        assert cli(*words, f"log={log}")[0] == status, mode
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    one_line(cli(*words, "log=wandb"), "WANDB_MODE=sometimes", "offline or online")


def test_a_batch_beyond_the_data_is_refused_from_its_counts(cli: Cli, shards: str) -> None:
    """The line has the words that were typed. There are 48 samples, and no length or some epochs."""
    words = [word for word in tiny(f"data.train={shards}", "batch=4k") if not word.startswith("samples=")]
    one_line(cli(*words), "batch=4096: the 48 samples in data.train make 1536", "32 epochs, the default")
    one_line(cli(*words, "epochs=2"), "batch=4096: the 48 samples in data.train make 96", "epochs=2")


def test_shards_of_which_nothing_is_usable_are_refused_at_once(cli: Cli, tmp_path: Path) -> None:
    """If another shard has a pair, it is a warning."""
    write_tar(tmp_path / "0.tar", [("a.img", b""), ("a.cap", b"")])
    words = [word for word in tiny(f"data.train={tmp_path}", "batch=4k") if not word.startswith("samples=")]
    one_line(cli(*words), "data.train: no sample is usable: samples of 0.tar hold .cap and .img", "KEY.jpg")
    write_tar(tmp_path / "1.tar", sample("b"))
    _, _, err = cli(*words)
    warning, refused = err.splitlines()
    assert ".cap and .img" in warning and "batch=4096" in refused, err


def test_a_start_names_pairs_whose_keys_end_at_a_dot(cli: Cli, tmp_path: Path) -> None:
    """They are named beside another pair of their key, too. A mask beside a picture is no such pair."""
    words = [word for word in tiny(f"data.train={tmp_path}", "batch=4k") if not word.startswith("samples=")]
    masked = [*sample("a"), ("a.mask.png", b"")]
    write_tar(tmp_path / "0.tar", masked)
    one_line(cli(*words), "batch=4096", "the 1 sample")
    for key in ("b", "a"):
        pair = [(f"{key}.2024.png", b""), (f"{key}.2024.txt", b"")]
        write_tar(tmp_path / "0.tar", [*masked, *pair])
        warning, refused = cli(*words)[2].splitlines()
        assert f"{key} holds" in warning and ".2024.png, .2024.txt" in warning and "first dot" in warning, warning
        assert "batch=4096" in refused, refused


def test_captions_that_lie_in_the_json_alone_are_answered_with_the_setting(cli: Cli, tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [member for member in sample("a") if not member[0].endswith(".txt")])
    remedy = "'data.captions=[json:KEY]' takes captions from the JSON; its text keys are alt"
    one_line(cli(*tiny(f"data.train={tmp_path}")), "hold .json and .png", remedy)


def test_under_torchrun_a_sweep_and_a_run_without_a_name_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    one_line(cli("train", "-m", "batch=32k,64k"), "-m", "leave torchrun out")
    one_line(cli("train", "data=demo"), "run", "run=NAME")


@pytest.mark.parametrize(
    "variables",
    ["RANK=1", "RANK=3 WORLD_SIZE=1", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "LOCAL_RANK=x"],
)
def test_variables_of_no_launcher_are_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    one_line(cli("train", "data=demo", "run=a"), variables.split("=")[0], "unset")
