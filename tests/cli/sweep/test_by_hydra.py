"""Sweeps by Hydra's launchers and sweepers make the runs of our own sweep, on this machine and on Slurm."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clipscale.cli.main import main
from clipscale.cli.sweep.by_hydra import objective
from clipscale.cli.sweep.job_folder import JOBS
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.records import read_metrics
from tests.conftest import TINY, Capture
from tests.eval.sets import classification_set
from tests.support.slurm import jobs_named, need_two_nodes, state

SHORT = [word for word in TINY if not word.startswith("samples=")]


def needs(plugin: str) -> pytest.MarkDecorator:
    missing = not (importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{plugin}"))
    return pytest.mark.skipif(missing, reason="the extra sweeps is not installed")


OPTUNA, JOBLIB, SUBMITIT = map(needs, ("hydra_optuna_sweeper", "hydra_joblib_launcher", "hydra_submitit_launcher"))


def sweep(shards: str, *words: str) -> int:
    return main(("train", "-m", *SHORT, f"data.train={shards}", "run=s", *words))


@pytest.mark.parametrize(
    "swept",
    [
        ("seed=1,13", "optim.weight_decay=choice(0.1)"),
        pytest.param(("seed=1,13", "optim.name=adamw,lion", "data.filter='a>=1','b<1'"), marks=pytest.mark.slow),
        pytest.param(("seed=1,13", "optim=adamw,lion", "loss=infcl,clip"), marks=pytest.mark.slow),
    ],
)
def test_a_launchers_runs_are_those_of_our_own_sweep(
    trained: list[TrainConfig], shards: str, capsys: Capture, swept: tuple[str, ...]
) -> None:
    """They have its settings, folders and copies. A failure ends only its run."""
    architecture = ("model.architecture.text_cfg.context_length=16", "data.filter=['c!=\"x,y\"']")
    words = ("samples=1k", *architecture, "checkpoint.copy=s3://b/c/", "optim.lr=1e-3", *swept)
    assert sweep(shards, *words) == 1
    own = [*trained]
    trained.clear()
    ours = capsys.readouterr()
    assert sweep(shards, *words, "hydra/launcher=basic") == 1
    assert len({config.run for config in own}) == 2 ** sum("choice" not in word for word in swept) and trained == own
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == ours.out.splitlines()[-1]
    failed = [sorted(line for line in text.splitlines() if "failed: " in line) for text in (err, ours.err)]
    assert failed[0] == failed[1] and len(failed[0]) == len(own) / 2


@pytest.mark.slow  # test_run_sweep.py has it, too
def test_a_signal_to_a_run_of_this_process_ends_the_sweep(trained: list[TrainConfig], shards: str) -> None:
    assert sweep(shards, "samples=32", "seed=99,2", "hydra/launcher=basic") == 143
    assert [config.seed for config in trained] == [99]


def test_settings_are_printed_and_nothing_starts(trained: list[TrainConfig], shards: str, capsys: Capture) -> None:
    assert sweep(shards, "samples=32", "seed=1,2", "hydra/launcher=basic", "--cfg", "job") == 0
    assert (trained, capsys.readouterr().out.count("\nseed: ")) == ([], 2)
    assert not Path("runs").exists()


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=basic",)], ids=["one by one", "by a launcher"])
def test_a_metric_that_nobody_asks_for_is_said_and_fails_no_run(
    trained: list[TrainConfig], shards: str, tmp_path: Path, capsys: Capture, launcher: tuple[str, ...]
) -> None:
    sets = f"eval.sets={classification_set(tmp_path / 'birds')}"
    assert sweep(shards, "samples=32", "seed=1,2", sets, "sweep.metric=birds/top9", *launcher) == 0
    assert "sweep.metric=birds/top9: only a sweeper" in capsys.readouterr().err


RESULTS = {"a/val": {"top1": 0.25}, "birds (limit 9)": {"top1": 0.5}, "birds (limit 9) (size 2)": {"top1": 0.75}}


@pytest.mark.parametrize(
    ("metric", "value"), [("", 3.0), ("a/val/top1", 0.25), ("birds/top1", 0.5), ("birds (limit 9) (size 2)/top1", 0.75)]
)
def test_a_sweeper_gets_the_metric_of_a_set_or_the_last_loss(metric: str, value: float) -> None:
    assert objective({"run": "runs/a", "step": 9, "loss": 3.0, "eval": RESULTS}, metric) == value


@pytest.mark.parametrize(
    ("result", "metric", "line"),
    [
        ({"loss": 3.0, "eval": RESULTS}, "bird/top1", "the run has a/val/top1, birds"),
        ({"loss": 3.0, "eval": RESULTS}, "birds/top5", "the run has a/val/top1, birds"),
        ({"loss": float("nan"), "eval": {}}, "", "nan"),
    ],
)
def test_a_result_that_a_sweeper_cannot_use_is_one_line(result: dict, metric: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        objective(result, metric)


WITHOUT = "import sys; sys.modules['hydra_plugins'] = None; from clipscale.cli.main import main; sys.exit(main())"


def test_a_plugin_that_is_not_installed_is_named_with_its_extra(tmp_path: Path) -> None:
    words = ["train", "-m", "data=x.tar", "hydra/sweeper=optuna", "seed=1,2"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *words], cwd=tmp_path, capture_output=True, text=True)
    line = "error: hydra/sweeper=optuna: its package is not installed; pip install 'clipscale[sweeps]'\n"
    assert (done.returncode, done.stderr) == (2, line)


@SUBMITIT
def test_jobs_of_several_tasks_and_unknown_keys_are_refused(
    trained: list[TrainConfig], shards: str, capsys: Capture
) -> None:
    words = ("samples=32", "seed=1,2", "hydra/launcher=submitit_slurm")
    for key, remedy in (
        ("nodes=2", "a Slurm job of its own"),
        ("tasks_per_node=8", "one task"),
        ("partitin=a", "partition'"),
    ):
        assert sweep(shards, *words, f"hydra.launcher.{key}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: hydra.launcher.{key}: ") and remedy in line
    assert not Path("runs").exists()


# A command that gets a signal while it works; `{work}` is where.
STOPPED = """
import os, signal, sys
from clipscale.cli.sweep import by_hydra, run_sweep
from clipscale.cli.main import main
def work(*_, **__): os.kill(os.getpid(), signal.{signal})
{work}
sys.exit(main())
"""
# The second signal comes while the runs save.
TWICE = "by_hydra.call_hydra = by_hydra.JobFolder.wait_for_jobs = work"


@pytest.mark.parametrize(
    ("launcher", "work", "number", "line"),
    [
        ((), "run_sweep.check = work", "SIGTERM", " before a run began"),
        pytest.param(
            ("hydra/launcher=joblib",), "by_hydra.call_hydra = work", "SIGUSR1", "; 0 of 2 runs complete", marks=JOBLIB
        ),
        pytest.param(("hydra/launcher=joblib",), TWICE, "SIGTERM", "; 0 of 2 runs complete", marks=JOBLIB),
    ],
)
def test_a_signal_before_the_runs_says_what_remains(
    shards: str, tmp_path: Path, launcher: tuple[str, ...], work: str, number: str, line: str
) -> None:
    words = ["train", "-m", *TINY, f"data.train={shards}", "run=s", *launcher, "seed=1,2"]
    program = [sys.executable, "-c", STOPPED.format(work=work, signal=number), *words]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, f"stopped by {number}{line}; the same command resumes it\n")


@SUBMITIT
def test_settings_for_slurm_are_printed_as_typed(shards: str, capsys: Capture) -> None:
    """The machine of the command line needs no GPU."""
    words = ("samples=32", "seed=1,2", "hydra/launcher=submitit_slurm", "device=cuda")
    assert sweep(shards, *words, "--cfg", "job") == 0
    assert capsys.readouterr().out.count("\ndevice: cuda\n") == 2


@JOBLIB
def test_a_value_that_a_plugin_cannot_take_is_one_line_that_says_why(shards: str, capsys: Capture) -> None:
    assert sweep(shards, "samples=32", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=two") == 2
    line = "error: hydra.launcher.n_jobs=two: Value 'two' of type 'str' could not be converted to Integer\n"
    assert capsys.readouterr().err == line


# ---- Optuna ----

FEW = ("samples=32", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1")


@pytest.mark.slow
@OPTUNA
@pytest.mark.filterwarnings("ignore")
def test_optuna_proposes_values_and_again_the_same(trained: list[TrainConfig], shards: str, capsys: Capture) -> None:
    """A run's loss is its seed here. Seed 13 fails, and ends nothing."""
    words = (*FEW, "hydra.sweeper.n_trials=8", "seed=5,6,13,14", "'optim.lr=tag(log,interval(1e-5,1e-2))'".strip("'"))
    assert sweep(shards, *words) == 1
    first = [*trained]
    assert len({config.optim.lr for config in first}) == 8
    assert {config.seed for config in first} >= {5, 13}
    assert all(1e-5 <= config.optim.lr <= 1e-2 for config in first)
    assert all(f"optim.lr={config.optim.lr}" in config.run and f"seed={config.seed}" in config.run for config in first)
    out, err = capsys.readouterr()
    assert "best: " in out and "seed=5 " in out and "(loss 5.0000)" in out
    assert err.count("error: failed: ") == sum(config.seed == 13 for config in first)
    trained.clear()
    assert sweep(shards, *words) == 1
    assert trained == first


@pytest.mark.slow
@OPTUNA
@pytest.mark.filterwarnings("ignore")
def test_optuna_gets_the_metric_and_its_direction(
    trained: list[TrainConfig], shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def run(config: TrainConfig, main: object, **options: object) -> dict:
        trained.append(config)
        return {"step": 2, "loss": 1.0, "run": config.run, "eval": {"birds": {"top1": config.seed / 10}}}

    monkeypatch.setattr("clipscale.launch.local.launch", run)
    sets = f"eval.sets={classification_set(tmp_path / 'birds')}"
    grid = ("hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=3", "seed=1,3,2")
    assert sweep(shards, *FEW, *grid, sets, "sweep.metric=birds/top1") == 0
    assert sorted(config.seed for config in trained) == [1, 2, 3]
    assert "best: seed=3 (birds/top1 0.3000)" in capsys.readouterr().out
    assert sweep(shards, *FEW, *grid, sets, "sweep.metric=birds/top9") == 1
    assert "sweep.metric=birds/top9: the run has birds/top1" in capsys.readouterr().err


@pytest.mark.slow
@OPTUNA
@pytest.mark.filterwarnings("ignore")
def test_a_study_can_be_kept_in_a_database(trained: list[TrainConfig], shards: str) -> None:
    kept = ("hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=rates", "hydra.sweeper.n_trials=1")
    for _ in range(2):
        assert sweep(shards, *FEW, *kept, "optim.lr=interval(1e-5,1e-2)", "hydra.sweeper.sampler.seed=null") == 0
    import optuna

    study = optuna.load_study(storage="sqlite:///study.db", study_name="rates")
    assert [trial.params["optim.lr"] for trial in study.trials] == [config.optim.lr for config in trained]
    assert len(trained) == 2


@OPTUNA
@pytest.mark.parametrize(
    "word",
    [
        "optim.lr=interval(1e-2,1e-4)",
        pytest.param("optim.lr=tag(log,interval(1e-2,1e-4))", marks=pytest.mark.slow),
        "optim.lr=tag(log,interval(0,1e-4))",
        pytest.param("optim.lr=range(1,0,0.1)", marks=pytest.mark.slow),
    ],
)
def test_values_that_no_sweeper_can_take_are_one_line(shards: str, capsys: Capture, word: str) -> None:
    assert sweep(shards, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", word) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {word}: ") and error.count("\n") == 1


# ---- real runs ----


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run / "metrics.jsonl")]


def wait_for(what: Callable[[], bool], said: Callable[[], str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.3)


def command(environment: dict, folder: Path, *words: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "clipscale", "train", "-m", *SHORT, "run=s", *words]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(program, cwd=folder, env=environment, stdout=log, stderr=log, text=True)


@pytest.mark.slow
@JOBLIB
def test_joblib_runs_side_by_side_save_at_a_signal_and_go_on(environment: dict, shards: str, tmp_path: Path) -> None:
    words = (f"data.train={shards}", "samples=1600", "seed=0,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    runs = [tmp_path / f"runs/s/seed={seed}" for seed in range(3)]
    log = tmp_path / "log"
    first = command(environment, tmp_path, *words)
    wait_for(lambda: all(len(steps(run)) > 2 for run in runs[:2]), log.read_text)
    first.send_signal(signal.SIGTERM)
    assert first.wait(120) == 143, log.read_text()
    stopped = [max(steps(run)) for run in runs[:2]]
    assert max(stopped) < 100 and log.read_text().count("stopped by SIGTERM after step") == 2
    assert "stopped by SIGTERM; 0 of 3 runs complete; the same command resumes it" in log.read_text()
    assert [len(re.findall(rf" seed={seed}: step=1 loss=", log.read_text())) for seed in range(3)] == [1, 1, 0]
    assert not runs[2].exists(), "the run that had not begun"
    assert [len([*run.glob("checkpoints/step_*")]) for run in runs[:2]] == [1, 1]
    assert command(environment, tmp_path, *words).wait(240) == 0, log.read_text()
    assert [steps(run) for run in runs] == [list(range(1, 101))] * 3
    before = log.read_text()
    assert command(environment, tmp_path, *words).wait(120) == 0
    assert log.read_text().removeprefix(before).count("nothing is left to train") == 3


@pytest.mark.slow
@OPTUNA
def test_optuna_chooses_values_by_real_results(environment: dict, shards: str, tmp_path: Path) -> None:
    sets = f"eval.sets=[{classification_set(tmp_path / 'birds')}]"
    words = (f"data.train={shards}", *FEW, sets, "sweep.metric=birds/top1", "hydra.sweeper.n_trials=2")
    assert command(environment, tmp_path, *words, "optim.lr=interval(1e-4,1e-2)").wait(240) == 0
    found = files.read_yaml(tmp_path / "runs/s/optimization_results.yaml")
    runs = [*(tmp_path / "runs/s").glob("optim.lr=*")]
    results = {run.name: json.loads((run / "result.json").read_text())["eval"]["birds"]["top1"] for run in runs}
    assert len(runs) == 2 and max(results.values()) == found["best_value"]
    assert results[f"optim.lr={found['best_params']['optim.lr']}"] == found["best_value"]


# ---- Slurm: a controller with two nodes, which .ci/slurm starts ----


@pytest.mark.slurm
@pytest.mark.timeout(900)
@SUBMITIT
def test_runs_on_slurm_save_at_sigterm_go_back_into_the_queue_and_end(
    environment: dict, shards: str, tmp_path: Path
) -> None:
    need_two_nodes()
    launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.name=sweep")
    words = (f"data.train={shards}", "samples=2400", "seed=0,1", *launcher)
    runs = [tmp_path / f"runs/s/seed={seed}" for seed in range(2)]
    parent = command(environment, tmp_path, *words)

    def said() -> str:
        logs = [tmp_path / "log", *tmp_path.glob("runs/s/.submitit/*/*log*")]
        return "\n".join(log.read_text() for log in logs)

    wait_for(lambda: all(len(steps(run)) > 2 for run in runs), said)
    job = min(jobs_named("sweep"))
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    wait_for(lambda: "stopped by SIGTERM after step" in said(), said)
    assert len(steps(runs[0])) < 150, "the run must be stopped before its end for this to test anything"
    wait_for(lambda: state(job) == "PENDING", said)
    # Slurm lets it rest for two minutes; at once, its node would still refuse it
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"], check=True)
    wait_for(lambda: parent.poll() is not None, said, seconds=480)
    assert parent.returncode == 0, said()
    assert [steps(run) for run in runs] == [list(range(1, 151))] * 2, said()
    assert not (tmp_path / "runs/s" / JOBS / "seed=0").read_text()
