"""Restarts by torchrun: of workers on one machine and on two, of a lost machine, and who ends with whom."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from clipscale.common.errors import UnreachableError
from clipscale.distributed.join import connect_store
from clipscale.run_folder.records import read_metrics
from tests.conftest import TINY

STEPS = 40
SAMPLES = f"samples={16 * STEPS}"
RUN = [*(word for word in TINY if not word.startswith("samples")), SAMPLES, "checkpoint.every=4", "loss.exchange=ring"]
# From the loss of a process to a step beyond the last.
RESTART_S = 60


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def test_a_start_shares_no_key_with_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank may have asked and ended. Its successor then asks again."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    server.set("asks/1", "of a rank that has ended")
    limit = timedelta(seconds=20)
    for start in ("first", "second"):
        with ThreadPoolExecutor(3) as threads:
            stores = list(threads.map(lambda rank: connect_store(rank, 3, limit)[0], range(3)))
        assert not stores[2].check(["address"]), "what a former start has left"
        stores[0].set("address", start)
        assert stores[1].get("address") == start.encode()
    assert "bind" not in capfd.readouterr().err, "torchrun's store is there, and no rank tries to open another"


def curve(run: Path) -> list[float]:
    """The losses in the order of the steps. A step that was taken twice has the later one."""
    losses = {record["step"]: record["loss"] for record in read_metrics(run / "metrics.jsonl")}
    return [losses[step] for step in sorted(losses)]


@contextmanager
def agents(folder: Path, environment: dict, words: list[str], nodes: int) -> Iterator[list[psutil.Popen]]:
    """torchrun on so many machines, which are one here, with two workers in all."""
    port = free_port()
    meet = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=a"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet, f"--nproc-per-node={2 // nodes}"]
    command = [*torchrun, "--max-restarts=3", "--local-addr=localhost", "-m", "clipscale", "train", *words]

    def start() -> psutil.Popen:
        with (folder / "output.txt").open("a") as output:
            return psutil.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)

    started = [start()]
    started[0].again = start
    try:
        while port not in [connection.laddr.port for connection in started[0].net_connections()]:
            time.sleep(0.1)  # the first one holds the store, with which the others would end
        started += [start() for _ in range(nodes - 1)]
        yield started
    finally:
        for agent in started:
            for process in [*agent.children(recursive=True), agent] if agent.is_running() else []:
                process.kill()
            agent.wait()


def workers(agent: psutil.Popen) -> list[psutil.Process]:
    return [child for child in agent.children() if "clipscale" in child.cmdline()]


def until_step(run: Path, step: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while len(curve(run)) < step:
        assert time.monotonic() < deadline, run.parent.joinpath("output.txt").read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "lost"), [(1, "worker"), (2, "worker"), (2, "agent")])
def test_a_restarted_run_has_the_undisturbed_curve(
    environment: dict, shards: str, tmp_path: Path, nodes: int, lost: str
) -> None:
    environment = environment | {"OMP_NUM_THREADS": "1"}  # torchrun chooses another number on two machines
    if lost == "agent":
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as launch/torchrun.sh says
    words = [*RUN, f"data.train={shards}"]
    clipscale = [sys.executable, "-m", "clipscale", "train", *words, "run=whole", "launch.procs=2"]
    subprocess.run(clipscale, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=240)
    run = tmp_path / "run"
    with agents(tmp_path, environment, [*words, f"run={run}"], nodes) as started:
        until_step(run, 8, 120)
        victims = workers(started[-1])
        before = len(curve(run))
        if lost == "worker":
            victims[-1].kill()
        else:
            started[-1].kill()
            psutil.wait_procs(victims, timeout=5)
            assert not any(victim.is_running() for victim in victims), "workers outlive their agent"
            started[-1].wait()
            started[-1] = started[0].again()
        until_step(run, before + 1, RESTART_S)
        ends = [agent.wait(timeout=180) for agent in started]
    assert ends == [0] * nodes, (tmp_path / "output.txt").read_text()[-3000:]
    assert curve(run) == curve(tmp_path / "runs/whole")


def test_a_rank_that_reaches_no_rank_0_says_it_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's machine is down, or it has started and does not answer."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    limit = timedelta(seconds=1)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(UnreachableError, match="rank 1 reached no rank 0"):
        connect_store(1, 2, limit)
    silent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(silent.port))
    with pytest.raises(UnreachableError, match="rank 1 reached no rank 0"):
        connect_store(1, 2, limit)


def test_rank_0_names_the_port_that_is_taken_or_the_address_that_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither need be a mistake: the rank 0 before it may still be ending, or a name not be known yet."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        port = listening.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UnreachableError, match=f"MASTER_PORT={port}: rank 0 cannot open it"):
            connect_store(0, 2, timedelta(seconds=1))
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(UnreachableError, match=r"MASTER_ADDR=no-such-host\.invalid: rank 0 does not reach itself"):
        connect_store(0, 2, timedelta(seconds=1))
