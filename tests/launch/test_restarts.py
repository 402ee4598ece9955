"""A failed run starts again from its newest checkpoint, by itself and under torchrun, in its own folder; a mistake does not."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from clipscale.checkpoint import found, path_of
from clipscale.common.errors import StoppedError, UserError
from clipscale.config.presets import PACKAGE
from clipscale.config.sections import JobConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed import world as distributed
from clipscale.launch import agent, local, restarts, slurm, torchrun
from clipscale.launch.description import describe
from clipscale.launch.restarts import WorkerError, group_size, restarted
from clipscale.report.metrics import read_metrics
from tests.conftest import TINY
from tests.launch.test_local import TRAIN, Start, gone, start, wait_until
from tests.support.ranks import run_ranks

__all__ = ["start"]


def save(run: Path, step: int) -> None:
    path_of(run, step).parent.mkdir(parents=True, exist_ok=True)
    path_of(run, step).touch()


def test_a_new_checkpoint_resets_the_count_of_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two restarts, and a failure after a checkpoint, another, and three without one."""
    pauses: list[float] = []
    monkeypatch.setattr(restarts.time, "sleep", pauses.append)
    config = TrainConfig(run=str(tmp_path), resume="none", launch=LaunchConfig(restarts=2))
    seen: list[str] = []

    def attempt(now: TrainConfig) -> None:
        seen.append(now.resume)
        if len(seen) in (2, 3):
            save(tmp_path, len(seen))
        raise WorkerError(f"failure {len(seen)}")

    with pytest.raises(WorkerError, match="failure 5"):
        restarted(config, attempt)
    assert seen == ["none", "none", "auto", "auto", "auto"], "from the own folder once it holds a checkpoint"
    assert pauses == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("UserError: lr=1: unknown", 0),
        ("LostRankError: rank 3 on node1 (process 7) failed in load: UserError: lr=1: unknown", 0),
        ("LostRankError: rank 3 on node1 (process 7) has died", 2),
        ("RuntimeError: out of memory", 2),
    ],
)
def test_torchruns_agent_does_not_try_a_mistake_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], message: str, left: int
) -> None:
    """Of a rank here, or on another machine, whose loss a rank here reports. Of other failures it prints the cause."""
    text = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": "5"}}
    failure = SimpleNamespace(message=text, timestamp=5, exitcode=1)
    result = SimpleNamespace(is_failed=lambda: True, failures={1: failure})
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: result)
    monkeypatch.setattr(ChildFailedError, "__init__", lambda self, _, failures: vars(self).update(failures=failures))
    kind = torchrun.agent()
    one = kind.__new__(kind)
    one._remaining_restarts = 2
    assert one._monitor_workers(SimpleNamespace(spec=SimpleNamespace(max_restarts=2))) is result
    assert one._remaining_restarts == left
    printed = capsys.readouterr().err
    assert (printed == "") if left == 0 else printed.endswith("\nrestart 1 of 2\n") and "error: " in printed


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["lr=1", "data.train=/nowhere/*.tar", "resume=/nowhere"])
def test_a_mistake_under_torchrun_is_one_line_at_once(start: Start, shards: str, tmp_path: Path, wrong: str) -> None:
    """Found before the ranks meet, by all of them, and by rank 0 alone."""
    script = str(PACKAGE.parent / "launch/torchrun-single.sh")
    process = start(script, *TINY, f"data.train={shards}", "run=a", wrong, PROCS="2", RESTARTS="2")
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 2, errors
    assert out == "" and len(errors.splitlines()) == 1, errors
    assert errors.startswith("error: ") and wrong.partition("=")[0] in errors


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    tries: list[int] = []

    def attempt(_: TrainConfig) -> None:
        tries.append(1)
        raise UserError("data.train is not set")

    with pytest.raises(UserError):
        restarted(TrainConfig(run=str(tmp_path), launch=LaunchConfig(restarts=9)), attempt)
    assert len(tries) == 1


@pytest.mark.parametrize(("batch", "left", "size"), [(2**20, 7, 4), (96, 7, 6), (64, 1, 1), (7, 6, 1)])
def test_a_smaller_group_shares_the_same_batch(batch: int, left: int, size: int) -> None:
    assert group_size(batch, left) == size


def test_a_run_goes_on_with_the_gpus_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: list[int] = []
    left = iter([8, 8, 7])

    def fails_once(_: TrainConfig, __: str, count: int) -> dict[str, Any]:
        counts.append(count)
        if len(counts) == 1:
            raise WorkerError("worker 3 failed: CUDA error: device lost")
        return {}

    monkeypatch.setattr(local, "gpus", lambda: next(left))
    monkeypatch.setattr(local, "start", fails_once)
    monkeypatch.setattr(restarts, "PAUSE_S", 0.0)
    local.run(TrainConfig(batch=1024, run=str(tmp_path), device="cuda", launch=LaunchConfig(restarts=1)))
    assert counts == [8, 4]
    assert "7 of 8 GPUs are left: the run goes on with 4 processes" in capsys.readouterr().err


def test_a_clean_save_is_no_failure_for_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = StoppedError("stopped", signal.SIGTERM)
    monkeypatch.delenv(agent.AGENT, raising=False)
    assert agent.status(UserError("a mistake")) == 2
    assert agent.status(stopped) == 143
    assert agent.speaks(stopped) and agent.speaks(UserError("a mistake"))
    monkeypatch.setenv(agent.AGENT, str(tmp_path))
    assert agent.status(stopped) == 0
    assert (tmp_path / agent.STOPPED).read_text() == "143"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    mistake = UserError("wandb.key=https://u:secret@host: a mistake")
    assert agent.status(mistake) == 2
    assert agent.speaks(stopped) and not agent.speaks(mistake), "the agent reads it in the file, and prints it"
    text = (tmp_path / "error.json").read_text()
    assert json.loads(text)["message"]["message"].startswith("UserError: wandb.key=") and "secret" not in text


def test_an_unnamed_run_keeps_its_name_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has moved to a new machine, which knows no name; rank 1 is on an old one."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    store = dist.HashStore()
    monkeypatch.setattr(distributed, "store", lambda: store)

    def named(rank: int, folder: str, name: str) -> str:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv(agent.AGENT, str(tmp_path / folder))
        return agent.shared_name(name)

    store.set("clipscale/run/1", "runs/first")
    assert named(0, "new", "runs/second") == "runs/first"
    assert named(1, "old", "runs/third") == "runs/first"
    assert (tmp_path / "old/run").read_text() == (tmp_path / "new/run").read_text() == "runs/first"


def waiting(config: TrainConfig) -> dict[str, Any]:
    """The part of a rank that is needed, in the place of `train`."""
    Path(config.run, os.environ["RANK"]).write_text(os.environ["WORLD_SIZE"])
    if config.resume == "none":
        raise StoppedError("stopped", signal.SIGTERM)
    return {}


def rank_of_three(rank: int, world: int, config: TrainConfig, port: int) -> str:
    """A rank that torchrun has started, in a store that rank 0 holds, as between machines."""
    dist.barrier()  # a rank that ends now would break what others begin
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= own | {agent.ELASTIC: "1", agent.AGENT: str(Path(config.run) / "agent")}
    for name in ("TORCHELASTIC_USE_AGENT_STORE", distributed.STORE):
        os.environ.pop(name, None)
    try:
        with patch.object(agent, "LOOK_S", 0.2):
            return str(local.join(config, f"{__name__}:waiting"))
    except StoppedError as error:
        return str(128 + error.number)
    finally:
        distributed.store.cache_clear()  # the end of rank 0 is the end of the store


@pytest.mark.parametrize(("resume", "answer"), [("auto", "{}"), ("none", "143")])
def test_ranks_that_cannot_share_the_batch_wait_for_its_end(
    tmp_path: Path, free_port: int, resume: str, answer: str
) -> None:
    """Of three ranks that torchrun has left, two train; the third ends as they do."""
    (tmp_path / "agent").mkdir()
    config = TrainConfig(batch=16, run=str(tmp_path), resume=resume, device="cpu")
    assert run_ranks(rank_of_three, 3, config, free_port) == [answer] * 3
    assert {name: (tmp_path / name).read_text() for name in "01"} == {"0": "2", "1": "2"}
    assert not (tmp_path / "2").exists()


def test_a_group_that_stays_the_same_refuses_a_batch_that_it_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(agent.ELASTIC, raising=False)
    assert not restarts.spare(16)
    assert os.environ["WORLD_SIZE"] == "3"


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["-m", "clipscale"], 120),
        (["launch.grace_s=44.5"], 45),
        (["launch.grace_s=soon"], 120),
        (["launch.grace_s=-1"], 0),
    ]
    + [(["launch.grace_s=nan"], 0)],
)
def test_torchruns_workers_have_the_runs_grace_after_a_signal(words: list[str], seconds: int) -> None:
    assert torchrun.end_s(words) == seconds + local.MARGIN_S


def killed_at(run: Callable[[], list[Path]], step: int, process: subprocess.Popen[str], pattern: str) -> None:
    """Kill one worker of `process` when the only run has a checkpoint of that step."""
    wait_until(lambda: any(found(one) and found(one)[-1] >= path_of(one, step) for one in run()), process)
    worker = next(
        child for child in psutil.Process(process.pid).children(recursive=True) if pattern in " ".join(child.cmdline())
    )
    worker.kill()


FOUR_STEPS = (*(word for word in TINY if not word.startswith("samples")), "samples=96", "checkpoint.every=1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [("launch.procs=2",), ("launch.procs=1",)])
def test_a_killed_worker_is_replaced(start: Start, shards: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    process = start(*TRAIN, *FOUR_STEPS, f"data.train={shards}", "run=a", "launch.restarts=1", *words)
    killed_at(lambda: [tmp_path / "runs/a"], 2, process, "spawn_main")
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "restart 1 of 1, after step" in errors
    assert "killed by SIGKILL" in errors
    assert "done: runs/a (step 6" in out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_restarts_an_unnamed_run_in_its_folder(
    start: Start, shards: str, tmp_path: Path, free_port: int, nodes: int
) -> None:
    if nodes == 1:
        script, variables = "torchrun-single.sh", {"PROCS": "2"}
    else:
        script = "torchrun-multi.sh"
        variables = {"NODES": "2", "PROCS": "1", "HEAD": f"localhost:{free_port}", "JOB": tmp_path.name}
    command = str(PACKAGE.parent / "launch" / script)
    agents = [start(command, *FOUR_STEPS, f"data.train={shards}", RESTARTS="2", **variables) for _ in range(nodes)]
    killed_at(lambda: list(tmp_path.glob("runs/*")), 2, agents[0], "-m clipscale train")
    printed = ""
    for one in agents:
        out, errors = one.communicate(timeout=240)
        assert one.returncode == 0, errors
        printed += out
    (run,) = tmp_path.glob("runs/*")
    assert f"done: runs/{run.name} (step 6" in printed
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_goes_on_with_the_nodes_that_are_there(
    start: Start, shards: str, tmp_path: Path, free_port: int
) -> None:
    """One or two. The second, of two ranks, comes later and dies with its agent; three ranks cannot share the batch."""
    words = [word.replace("samples=96", "samples=1600") for word in FOUR_STEPS]
    common = {"NODES": "1:2", "PROCS": "1", "HEAD": f"localhost:{free_port}", "JOB": tmp_path.name, "RESTARTS": "2"}
    words += [f"data.train={shards}", "run=a", "launch.timeout_s=60"]
    command = (str(PACKAGE.parent / "launch/torchrun-multi.sh"), *words)
    first, run = start(*command, **common), tmp_path / "runs/a"

    def processes() -> int:
        return int(json.loads((run / "env.json").read_text() or "{}").get("processes", 0)) if found(run) else 0

    def steps() -> int:
        return len(read_metrics(run / "metrics.jsonl"))

    wait_until(lambda: processes() == 1, first)
    second = start(*command, **common | {"PROCS": "2"})
    wait_until(lambda: processes() == 2, first, second, seconds=300)
    before = steps()
    wait_until(lambda: steps() > before, first, second)
    ranks = psutil.Process(second.pid).children(recursive=True)
    second.kill()
    assert gone(ranks, 30)
    of_second = second.communicate()
    out, errors = first.communicate(timeout=500)
    assert first.returncode == 0, errors
    assert "restart 1 of 2" in errors and (out + of_second[0]).count("going on after step") == 2, (out, errors)
    assert "3 processes cannot share batch=16 evenly: the run goes on with 2" in errors + of_second[1]
    assert "done: runs/a (step 100" in out and processes() == 1
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 101)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["agent", "worker"])
def test_a_signal_under_torchrun_ends_with_its_status_and_no_restart(
    start: Start, shards: str, tmp_path: Path, target: str
) -> None:
    words = [word.replace("samples=96", "samples=1M") for word in FOUR_STEPS]
    script = str(PACKAGE.parent / "launch/torchrun-single.sh")
    process = start(script, *words, f"data.train={shards}", "run=a", PROCS="2", RESTARTS="2")
    wait_until(lambda: bool(found(tmp_path / "runs/a")), process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in everyone if "-m clipscale train" in " ".join(child.cmdline())]
    (workers[1] if target == "worker" else process).send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 143, errors
    assert "stopped by a signal after step" in errors
    assert gone(everyone, 15)


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [(0, 0, False), (2, 0, False), (130, 0, False), (143, 99, True), (137, 2, True), (1, 3, False)],
)
def test_slurm_requeues_what_another_try_can_help(status: int, restarts: int, again: bool, tmp_path: Path) -> None:
    """`restarts`: how often the job has been in the queue again."""
    bodies = (("srun", f"exit {status}"), ("scontrol", f"echo $1 >> {tmp_path}/called; echo a"))
    for name, body in bodies:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    config = TrainConfig(run="a", launch=LaunchConfig(procs=1, restarts=3), job=JobConfig(scheduler="slurm", nodes=1))
    (tmp_path / "job.sh").write_text(slurm.script(describe(config, ["run=a"], named=True)))
    job = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for script in (tmp_path / "job.sh", PACKAGE.parent / "launch/slurm.sh"):
        (tmp_path / "called").unlink(missing_ok=True)
        done = subprocess.run(["bash", str(script)], env=job | {"PATH": path, "SLURM_RESTART_COUNT": str(restarts)})
        assert done.returncode == status
        assert ("requeue" in (tmp_path / "called").read_text()) == again, script
