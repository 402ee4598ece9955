"""The processes of one machine meet where nobody else can: torch unpickles what it finds there."""

import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from clipscale.common.errors import UserError
from clipscale.config.presets import PACKAGE
from clipscale.config.sections import LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed import world as distributed
from clipscale.launch import local
from tests.conftest import TINY


def listens(connection: Any) -> bool:
    return connection.status == psutil.CONN_LISTEN


def listeners(process: subprocess.Popen[str]) -> Iterator[str]:
    """The addresses at which a process and its children listen, again and again until it ends."""
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            for one in (parent, *parent.children(recursive=True)):
                with suppress(psutil.Error):
                    yield from (at.laddr.ip for at in one.net_connections("inet") if listens(at))
        time.sleep(0.05)


def listening(config: TrainConfig) -> dict[str, Any]:
    """A worker that joins the others and reports where it listens, and the launcher, whose number is the seed."""
    world = distributed.start("cpu", 1, 60)
    both = psutil.Process(), psutil.Process(config.seed)
    addresses = {at.laddr.ip for one in both for at in one.net_connections("inet") if listens(at)}
    every = set().union(*world.gather(addresses))
    distributed.stop()
    raise UserError(f"run={config.run}: {world.size} workers listen at {' '.join(sorted(every))}")


def test_the_workers_of_a_run_and_their_launcher_listen_on_loopback_alone(tmp_path: Path) -> None:
    launch = LaunchConfig(procs=2, threads=1)
    config = TrainConfig(run=str(tmp_path / "run"), batch=16, device="cpu", launch=launch, seed=os.getpid())
    with pytest.raises(UserError, match="2 workers listen at ") as caught:
        local.run(config, f"{__name__}:listening")
    found = str(caught.value).partition("listen at ")[2].split()
    assert found and all(ipaddress.ip_address(address).is_loopback for address in found), found


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "doctor", "torchrun", "bench"])
def test_the_processes_of_one_machine_listen_on_loopback_alone(
    verb: str, shards: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    words = [*TINY, f"data.train={shards}", "run=r"]
    clipscale = [sys.executable, "-m", "clipscale"]
    command = {
        "train": [*clipscale, "train", *words, "launch.procs=2"],
        "doctor": [*clipscale, "doctor"],
        "torchrun": [str(PACKAGE.parent / "launch/torchrun-single.sh"), *words],
        "bench": [*clipscale, "bench", "loss", "n=64", "d=16", "methods=infcl", "ranks=2", "device=cpu", "repeats=1"],
    }[verb]
    variables = environment | {"PROCS": "2", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        found = set(listeners(process))
        printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert found, "no process group was seen"
    assert all(ipaddress.ip_address(address).is_loopback for address in found), found


def test_without_torchrun_the_first_rank_listens_at_the_given_address_alone(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """As under Slurm, where no agent holds the store."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "RANK": "0", "WORLD_SIZE": "1"}
    for name in ("TORCHELASTIC_USE_AGENT_STORE", distributed.STORE):
        monkeypatch.delenv(name, raising=False)
    for name, value in (given | {"LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    store = distributed.store.__wrapped__()
    try:
        own = psutil.Process(os.getpid()).net_connections("inet")
        assert {at.laddr.ip for at in own if at.laddr.port == free_port and not at.raddr} == {"127.0.0.1"}
        other = dist.TCPStore("127.0.0.1", free_port, 1, False)
        store.set("key", "value")
        assert other.get("key") == b"value"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.2", free_port)) != 0
    finally:
        del store
