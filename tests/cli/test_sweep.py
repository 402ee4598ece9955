"""Sweeps: every combination runs in its own folder, a failure does not end the sweep, and a table closes it."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from clipscale.cli.compose import job_dir
from clipscale.cli.main import main
from clipscale.cli.overrides import literal
from clipscale.cli.sweep import (
    already_done,
    finished,
    hide_secrets,
    settings_digest,
    slurm_overrides,
    sweep_folder,
    table,
    written,
)
from clipscale.common.errors import UserError
from clipscale.config.sections import LaunchConfig
from clipscale.config.train import TrainConfig
from tests.conftest import TINY, Command


@pytest.mark.slow  # three processes that import torch
def test_each_job_has_a_folder_a_failed_one_ends_nothing_and_a_table_closes(
    command: Command, shards: str, tmp_path: Path
) -> None:
    words = [word for word in TINY if not word.startswith("batch")]
    done = command("train", "-m", *words, f"data.train={shards}", "batch=16,64", "run=sizes", COLUMNS="200")
    folder = tmp_path / "runs/sizes"
    assert done.returncode == 1, done.stderr[-2000:]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"batch=16", "batch=64"}
    assert len((folder / "batch=16/metrics.jsonl").read_text().splitlines()) == 2
    good, bad = (json.loads((folder / f"batch={n}/result.json").read_text()) for n in (16, 64))
    assert (good["step"], math.isfinite(good["loss"]), "error" in good) == (2, True, False)
    assert "samples=32 is less than one batch" in bad["error"]
    assert "error: samples=32 is less than one batch" in done.stderr
    assert done.stderr.rstrip().endswith("error: 1 of 2 jobs failed")
    rows = [line for line in done.stdout.splitlines() if re.search(r"^ *batch=(16|64) +(2|samples)", line)]
    assert len(rows) == 2, done.stdout
    assert "done" in rows[0]
    assert "samples=32 is less" in rows[1]


def test_the_table_shows_loss_and_the_main_figure_of_every_set() -> None:
    results = [
        {"job": 0, "name": "a", "step": 5, "loss": 1.25, "eval": {"birds": {"top1": 0.5, "top5": 0.9}}},
        {"job": 1, "name": "b", "error": "went wrong"},
    ]
    console = Console(width=120, file=open(os.devnull, "w"), record=True)  # noqa: SIM115, PTH123
    console.print(table(results, Path("runs/x")))
    text = console.export_text()
    assert "birds top1" in text
    assert "1.2500" in text
    assert "50.0" in text
    assert "went wrong" in text


def test_results_of_an_earlier_sweep_are_left_out(tmp_path: Path) -> None:
    """Whatever the clock says: new results may look older than those of the earlier sweep."""

    def write(name: str, number: int, age: float) -> None:
        file = tmp_path / name / "result.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"job": number, "name": name}))
        os.utime(file, (file.stat().st_mtime - age,) * 2)

    write("old", 0, 0)
    write("again", 2, 0)
    earlier = written(tmp_path)
    write("again", 2, 3600)
    write("new", 1, 7200)
    assert [record["name"] for record in finished(tmp_path, earlier)] == ["new", "again"]


def test_a_jobs_folder_is_named_after_its_values_and_safe() -> None:
    assert job_dir("model=vit-b32,batch=64k", 3) == "model=vit-b32,batch=64k"
    assert job_dir("data.train=/a/{0..9}.tar", 3) == "data.train=-a-0..9-.tar"
    assert job_dir("optim.name='lion'", 3) == "optim.name=lion", "texts are quoted for Hydra"
    assert job_dir("", 3) == "3"
    long = ",".join(f"key{i}=value" for i in range(50))
    assert len(job_dir(long, 0)) <= 100
    assert job_dir(long, 0) != job_dir(long + "x", 0)


def test_hydra_reads_what_a_sweep_draws_from() -> None:
    assert literal("optim.name", "adamw,lion", True) == "'adamw','lion'"
    assert literal("optim.name", "choice(adamw,lion)", True) == "choice(adamw,lion)"
    assert literal("run", "b32(2)", True) == "'b32(2)'"


def test_run_names_the_sweep_unless_it_varies() -> None:
    assert sweep_folder(["-m", "run=a", "batch=1,2"]) == (Path("runs/a"), ["-m", "batch=1,2"])
    folder, rest = sweep_folder(["-m", "run=a,b"])
    assert folder.name.startswith("sweep-")
    assert rest == ["-m", "run=a,b"]
    with pytest.raises(UserError, match="name the sweep's folder with run=NAME"):
        sweep_folder(["-m", "hydra.sweep.subdir=x"])


def test_a_repeated_sweep_trains_only_what_is_not_done(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[str] = []

    def run(config: TrainConfig, *, isolated: bool) -> dict[str, object]:
        trained.append(Path(config.run).name)
        if config.seed == 1 and len(trained) == 2:
            raise UserError("went wrong")
        return {"step": 2, "loss": 1.0 + config.seed, "run": config.run}

    monkeypatch.setattr("clipscale.launch.local.run", run)
    words = ["train", "-m", *TINY, f"data.train={shards}", "seed=0,1", "run=s"]
    assert main(words) == 1
    assert main(words) == 0
    assert trained == ["seed=0", "seed=1", "seed=1"]
    assert capfd.readouterr().out.count("done already, with the same settings") == 1
    assert "2.0000" in (tmp_path / "runs/s/sweep.html").read_text()


def test_processes_and_folders_make_no_other_run_but_settings_do(tmp_path: Path) -> None:
    config = TrainConfig(samples=16, run="a")
    digest = settings_digest(config)
    assert digest == settings_digest(replace(config, run="b", resume="none", launch=LaunchConfig(procs=4)))
    assert digest != settings_digest(replace(config, launch=LaunchConfig(parallel="fsdp")))
    assert digest != settings_digest(replace(config, seed=1))
    done = {"job": 0, "name": "a", "settings": digest}
    for record, same in ((done, True), (done | {"error": "x"}, False), ({"settings": digest}, False), ({}, False)):
        (tmp_path / "result.json").write_text(json.dumps(record))
        assert (already_done(tmp_path, digest) is not None) == same
    (tmp_path / "result.json").write_text("{")
    assert already_done(tmp_path, digest) is None


def test_hydras_record_of_a_sweep_keeps_no_secret(tmp_path: Path) -> None:
    (tmp_path / "multirun.yaml").write_text("- data.train=https://host/a.tar?X-Amz-Signature=planted\n")
    hide_secrets(tmp_path)
    assert (tmp_path / "multirun.yaml").read_text() == "- data.train=https://host/a.tar?***\n"
    with pytest.raises(UserError, match=r"data\.train holds a secret"):
        slurm_overrides(["launch=slurm", "data.train=https://host/a.tar?X-Amz-Signature=planted"])


def test_slurm_jobs_of_a_sweep_have_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "")
    words = ["-m", "launch=slurm", "launch.procs=4", "job.cpus=8", "job.options.partition=gpu", "seed=0,1"]
    made = slurm_overrides(words)
    assert made[0] == "hydra/launcher=submitit_slurm"
    assert "hydra.launcher.partition=gpu" in made
    assert "hydra.launcher.gpus_per_node='${launch.procs}'" in made
    OverridesParser.create().parse_overrides(made)  # Hydra can read them
    assert not any("timeout_min" in word for word in made), "without job.hours, the plugin's own limit counts"
    assert "hydra.launcher.gpus_per_node=null" in slurm_overrides([*words, "device=cpu"])


@pytest.mark.slow
def test_optuna_chooses_the_values_and_a_repeated_sweep_goes_on(command: Command, shards: str, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["train", "-m", *TINY, f"data.train={shards}", "optim.lr=interval(1e-4,1e-2)", "run=found"]
    words += [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
    ]
    first = command(*words)
    assert first.returncode == 0, first.stderr[-2000:]
    again = command(*words)
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.count("done already") == 2, again.stdout
