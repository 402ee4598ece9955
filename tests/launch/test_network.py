"""Two nodes for real, in network namespaces with a cable between them, which is unplugged for a while."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clipscale.config.presets import PACKAGE
from clipscale.report.metrics import read_metrics
from tests.conftest import TINY
from tests.launch.test_local import TRAIN, Start, start, wait_until

__all__ = ["start"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WORDS = (*(word for word in TINY if not word.startswith("samples")), "samples=1600", "checkpoint.every=5", "run=two")
STEPS = 100
TIMEOUT_S = 9


@dataclass
class Nodes:
    """Two network namespaces, and the variables of a process in each."""

    names: tuple[str, str]

    def command(self, node: int, *words: str) -> tuple[str, ...]:
        """A command line that runs on a node, which also has a host name of its own."""
        named = f'hostname node{node} && exec "$@"'
        return ("ip", "netns", "exec", self.names[node], "unshare", "--uts", "sh", "-c", named, "sh", *words)

    def cable(self, state: str) -> None:
        """Plug it in (`up`) or out (`down`)."""
        for name in self.names:
            subprocess.run(["ip", "-n", name, "link", "set", "cable", state], check=True)

    def variables(self, node: int) -> dict[str, str]:
        """As launch/slurm.sh sets them."""
        return {
            "RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "cable",
        }  # fmt: skip


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    names = (f"clipscale-{os.getpid()}-0", f"clipscale-{os.getpid()}-1")
    cables = [f"c{os.getpid() % 10**6}-{end}" for end in range(2)]
    try:
        for name in names:
            hosts = Path("/etc/netns") / name / "hosts"  # `ip netns exec` puts it in the place of /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        subprocess.run(["ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1]], check=True)
        for number, (name, cable) in enumerate(zip(names, cables)):
            subprocess.run(["ip", "link", "set", cable, "netns", name, "name", "cable"], check=True)
            subprocess.run(["ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable"], check=True)
            for device in ("lo", "cable"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield Nodes(names)
    except (FileNotFoundError, PermissionError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def steps(folder: Path) -> int:
    return len(read_metrics(folder / "runs/two/metrics.jsonl"))


def wait_for_steps(folder: Path, count: int, processes: list[subprocess.Popen[str]]) -> None:
    wait_until(lambda: steps(folder) >= count, *processes)


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "runs/two/metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def test_a_cut_network_is_named_on_both_sides_and_the_run_goes_on(
    start: Start, shards: str, tmp_path: Path, nodes: Nodes
) -> None:
    """Started as Slurm does. The nodes share the run's folder, as they share storage."""
    words = (*TRAIN, *WORDS, f"data.train={shards}", f"launch.timeout_s={TIMEOUT_S}")

    def both() -> list[subprocess.Popen[str]]:
        return [start(*nodes.command(node, *words), **nodes.variables(node)) for node in range(2)]

    pair = both()
    wait_for_steps(tmp_path, 7, pair)
    nodes.cable("down")
    cut = time.monotonic()
    printed = []
    for process in pair:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 1, errors
        assert "Traceback" not in errors, errors
        printed += [line for line in errors.splitlines() if line.startswith("error:")]
    taken = time.monotonic() - cut
    assert taken < 3 * TIMEOUT_S, f"{taken:.1f} s after a time-out of {TIMEOUT_S} s"
    line = r"error: all ranks live and wait for each other in \w+.* of step \d+: the network between node0, node1 may be down"
    assert printed and all(re.match(line, one) for one in printed), printed
    before = steps(tmp_path)
    assert before < STEPS
    nodes.cable("up")
    for process in both():
        out, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
        assert "going on after step" in out or process.args[3].endswith("-1")  # type: ignore[index]
    found = losses(tmp_path)
    (tmp_path / "runs/two").rename(tmp_path / "runs/cut")
    for process in both():
        assert not process.wait(180)
    assert found == pytest.approx(losses(tmp_path), rel=1e-6)


def test_torchruns_restarts_go_on_after_a_cut(start: Start, shards: str, tmp_path: Path, nodes: Nodes) -> None:
    script = str(PACKAGE.parent / "launch/torchrun-multi.sh")
    common = {"NODES": "2", "PROCS": "1", "HEAD": "10.77.0.1:29512", "RESTARTS": "3", "GLOO_SOCKET_IFNAME": "cable"}
    agents = []
    for node in range(2):
        words = nodes.command(node, script, *WORDS, f"data.train={shards}", f"launch.timeout_s={TIMEOUT_S}")
        agents.append(start(*words, **common, JOB=tmp_path.name))
    wait_for_steps(tmp_path, 7, agents)
    nodes.cable("down")
    time.sleep(TIMEOUT_S + 6)
    nodes.cable("up")
    for agent in agents:
        _, errors = agent.communicate(timeout=400)
        assert agent.returncode == 0, errors[-3000:]
    assert losses(tmp_path)
