"""`train --check`: what a start would refuse is said, and nothing is started."""

import json
import signal
from pathlib import Path

import pytest

from clipscale.tools import check_start
from tests.cli.conftest import Cli, tiny
from tests.cli.conftest import cli as cli
from tests.data.files import write_tar
from tests.eval.sets import classification_set
from tests.models.weights.test_load_weights import open_clip_folder, random_model

CUT = b"not a picture"
WRONG = {
    "shards": "data.train={}/bad.tar",
    "weights": "model.weights={}/half.pt",
    "set": "eval.sets={}/set",
    "teacher": "distill.teachers=[tea]",
}


def test_what_is_there_is_named_and_nothing_is_started(cli: Cli, shards: str, tmp_path: Path) -> None:
    """A batch larger than the data makes a warning."""
    sets = f"eval.sets={classification_set(tmp_path / 'colours')}"
    status, out, err = cli(*tiny(f"data.train={shards}", "run=a", sets, "batch=1k", "samples=2k"), "--check")
    assert status == 0 and "batch=1024 is larger than the" in err, err
    assert "2 shards, 1 evaluation set\n" in out and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=1,2")], ids=["a run", "a sweep"])
def test_a_check_says_that_it_loads_torch_and_hears_signals(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch, sweep: tuple[str, ...]
) -> None:
    heard: list[bool] = []
    monkeypatch.setattr(check_start, "main", lambda _: heard.append(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL))
    status, out, err = cli(*tiny(f"data.train={shards}"), *sweep, "--check")
    assert (status, out) == (0, "") and err.endswith("loading torch ...\n") and err.count("\n") == 1, err
    assert heard == [True] * (2 if sweep else 1)


def test_weights_of_a_repository_bring_their_model(
    cli: Cli, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_clip_folder(tmp_path / "theirs", random_model(1))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *names, **options: str(folder))
    status, out, err = cli("train", f"data.train={shards}", "model.weights=hf-hub:org/their-clip", "--check")
    assert status == 0 and "nothing is started: their-clip of 32 pixels" in out, err


@pytest.mark.parametrize("sweep", [(), ("-m",)], ids=["a run", "a sweep"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_only_a_start_would_find_is_said(
    cli: Cli, shards: str, tmp_path: Path, wrong: str, sweep: tuple[str, ...]
) -> None:
    write_tar(tmp_path / "bad.tar", [("0.jpg", CUT), ("0.txt", b"a caption")])
    (tmp_path / "half.pt").write_bytes(CUT)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/captions.json").write_text(json.dumps({"images": 3}))
    words = [f"data.train={shards}", WRONG[wrong].format(tmp_path)]
    status, _, err = cli(*tiny(*words[wrong == "shards" :]), *sweep, "--check")
    assert status == 2 and WRONG[wrong].replace("[", "").replace("]", "").format(tmp_path).rpartition("/")[2] in err, (
        err
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (("run=b", "cache.chunk=32"), "cache.chunk=32: one process holds 16 samples of the batch"),
        (("run=a", "batch=8"), "batch=8: the checkpoint was trained with 16"),
        (("run=b", "resume=a", "optim.name=lion"), "optim.name='lion': the checkpoint was trained with 'adamw'"),
        (("run=a", "resume=none"), "run=runs/a already holds checkpoints"),
    ],
)
def test_a_chunk_and_a_checkpoint_that_a_start_would_refuse_are_refused(
    cli: Cli, shards: str, words: tuple[str, ...], mistake: str
) -> None:
    """A newer checkpoint that is damaged is passed over, as at a start."""
    assert cli(*tiny(f"data.train={shards}", "run=a"))[0] == 0
    damaged = Path("runs/a/checkpoints/step_00000009")
    damaged.mkdir()
    (damaged / "meta.json").write_bytes(CUT)
    status, _, err = cli(*tiny(f"data.train={shards}", *words), "--check")
    assert status == 2 and mistake in err, err
