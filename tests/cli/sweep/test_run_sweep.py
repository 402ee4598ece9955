"""Sweeps: every combination runs in its own folder, and a failure does not end the sweep."""

from pathlib import Path

import pytest

from clipscale.cli.main import main
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.paths import META, checkpoint_path
from tests.cli.conftest import Cli
from tests.conftest import TINY, Capture


@pytest.mark.usefixtures("hydra_itself")
def test_all_combinations_run_in_hydras_order_and_failures_are_named(
    trained: list[TrainConfig], shards: str, capsys: Capture
) -> None:
    tiny = [word for word in TINY if not word.startswith("samples=")]
    swept = "seed=1,13", "samples=2k,4k"
    assert main(("train", "-m", *tiny, f"data.train={shards}", "run=s", "checkpoint.copy=s3://b/c/", *swept)) == 1
    assert [(config.seed, config.samples) for config in trained] == [
        (seed, samples) for seed in (1, 13) for samples in (2048, 4096)
    ]
    assert trained[0].run == "runs/s/seed=1,samples=2k"
    assert trained[0].checkpoint.copy == "s3://b/c/seed=1,samples=2k"
    assert {config.epochs for config in trained} == {None}
    out, err = capsys.readouterr()
    assert out.endswith("done: runs/s; clipscale report runs/s compares its runs\n")
    failed = [line for line in err.splitlines() if line.startswith("error: failed: seed=13,")]
    assert len(failed) == 2 == err.count("went wrong")


def test_values_of_texts_and_hydras_ranges_are_swept(trained: list[TrainConfig], shards: str) -> None:
    assert main(("train", "-m", *TINY, f"data.train={shards}", "optim.name=adamw,lion", "seed=range(2)")) == 0
    assert [(config.optim.name, config.seed) for config in trained] == [
        ("adamw", 0), ("adamw", 1), ("lion", 0), ("lion", 1),
    ]  # fmt: skip
    assert Path(trained[0].run).parent.name.startswith("sweep-")


@pytest.mark.parametrize(
    "word",
    ["data.filter=similarity>=0.5,similarity<=0.5", "data.train={0}/a/b.tar,{0}/a-b.tar", "data.same=a-,a"],
)
def test_no_two_runs_share_a_folder_or_a_copy(
    trained: list[TrainConfig], shards: str, tmp_path: Path, word: str
) -> None:
    for path in ("a/b.tar", "a-b.tar"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).symlink_to(shards.replace("{0..1}", "0"))
    train = () if "data.train" in word else (f"data.train={shards}",)
    assert main(("train", "-m", *TINY, *train, "run=s", "checkpoint.copy=s3://b/c", word.format(tmp_path))) == 0
    assert len({config.run for config in trained}) == len({config.checkpoint.copy for config in trained}) == 2


def test_runs_that_would_share_a_folder_are_refused(trained: list[TrainConfig], shards: str, capsys: Capture) -> None:
    """One case has a field of that name, the other has none."""
    assert main(("train", "-m", *TINY, f"data.train={shards}", "run=s", "data.same='null',null")) == 2
    assert trained == []
    assert "runs/s/data.same=null" in capsys.readouterr().err


def test_a_wrong_combination_ends_the_sweep_before_it_begins(trained: list[TrainConfig], shards: str) -> None:
    assert main(("train", "-m", *TINY, f"data.train={shards}", "batch=16,0")) == 2
    assert trained == []


def test_a_sweeps_settings_are_printed_and_equal_ones_are_one_run(
    trained: list[TrainConfig], shards: str, capsys: Capture
) -> None:
    words = ("train", "-m", *TINY, f"data.train={shards}", "run=s", "seed=1,2,1")
    assert main((*words, "--cfg", "job")) == 0
    assert trained == [], "nothing is trained"
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("#")] == ["# runs/s/seed=1", "# runs/s/seed=2"]
    assert out.count("\nseed: ") == 2
    assert main(words) == 0
    assert [config.seed for config in trained] == [1, 2]


PLUGIN = "hydra/launcher=basic"


@pytest.mark.parametrize("way", [(), (PLUGIN,)], ids=["one by one", "by a launcher"])
def test_a_run_whose_disk_is_full_ends_itself_alone(
    trained: list[TrainConfig], shards: str, capsys: Capture, way: tuple[str, ...]
) -> None:
    assert main(("train", "-m", *TINY, f"data.train={shards}", "run=s", "seed=17,1", *way)) == 1
    assert [config.seed for config in trained] == [17, 1]
    assert capsys.readouterr().err.endswith("error: failed: seed=17\n")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("run=s",), "the same command resumes it"),
        ((), "the same command with run={} resumes it"),
        (("run=s", "resume=none"), "the same command with resume=auto resumes it"),
        # The line is made in one place: with a launcher, one of them is enough for the ordinary suite.
        pytest.param(("run=s", PLUGIN), "the same command resumes it", marks=pytest.mark.slow),
        pytest.param((PLUGIN,), "the same command with run={} resumes it", marks=pytest.mark.slow),
        (("run=s", "resume=none", PLUGIN), "the same command with resume=auto resumes it"),
    ],
)
def test_a_signal_ends_the_sweep_and_the_line_says_what_goes_on(
    trained: list[TrainConfig], shards: str, capsys: Capture, words: tuple[str, ...], advice: str
) -> None:
    """A command without a name would begin another sweep."""
    assert main(("train", "-m", *TINY, f"data.train={shards}", "seed=1,99,2", *words)) == 143
    assert [config.seed for config in trained] == [1, 99]
    folder = Path(trained[0].run).parent
    assert f"stopped by SIGTERM; {advice.format(folder)}\n" in capsys.readouterr().err


def test_a_run_that_has_gone_on_from_a_path_goes_on_from_its_own_checkpoint(
    trained: list[TrainConfig], shards: str, tmp_path: Path
) -> None:
    """A new run begins with the path. The path's run may train on meanwhile, beyond the sweep's."""
    start = checkpoint_path(tmp_path / "runs/b32", 4)
    later = checkpoint_path(tmp_path / "runs/b32", 8)
    own = checkpoint_path(tmp_path / "runs/s/seed=1", 6)
    for path in (start, later, own):
        path.mkdir(parents=True)
        (path / META).touch()
    for resume in ("b32", str(start), str(later)):
        words = ("train", "-m", *TINY, f"data.train={shards}", "run=s", f"resume={resume}", "seed=1,2")
        assert main(words) == 0
        assert [config.resume for config in trained] == ["auto", resume]
        trained.clear()


@pytest.mark.slow
def test_a_repeated_sweep_trains_only_what_is_left(cli: Cli, shards: str, tmp_path: Path) -> None:
    words = ("train", "-m", *TINY, f"data.train={shards}", "seed=0,1", "run=s")
    assert cli(*words)[0] == 0
    status, out, err = cli(*words)
    assert (status, out.count("is complete at step 2: nothing is left to train")) == (0, 2), out + err
    assert len((tmp_path / "runs/s/seed=1/metrics.jsonl").read_text().splitlines()) == 2


def test_a_sweep_has_one_name(trained: list[TrainConfig], shards: str, capsys: Capture) -> None:
    assert main(("train", "-m", *TINY, f"data.train={shards}", "seed=0,1", "run=a,b")) == 2
    assert trained == []
    assert "give one run=NAME" in capsys.readouterr().err
