"""Shared by all tests: one thread per process, small shards, and the environment of a command."""

import os

# Before torch is imported: the machine's cores are shared by the tests' own processes.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("WANDB_MODE", "offline")

import atexit
import fcntl
import gc
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.forked_processes import fork_a_server, share_one_server, start_a_server, warm_up

if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has it in its environment already
    # Indexes know shards by their path: neither the user's nor an earlier session's.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="clipscale-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
gc.disable()  # until all modules are there
sys.modules["wandb"] = None  # timm imports it, a second in each of pytest's workers
share_one_server()
settings.register_profile("shared machine", deadline=None, max_examples=50)
settings.load_profile("shared machine")

TINIEST = (
    "model=tiny",
    "model.architecture.vision_cfg.layers=1",
    "model.architecture.text_cfg.layers=1",
    "model.architecture.text_cfg.width=64",
    "model.architecture.text_cfg.heads=2",
)
# A training run of two steps, two chunks each.
TINY = (
    *TINIEST,
    "precision=fp32",
    "batch=16",
    "cache.chunk=8",
    "samples=32",
    "schedule.warmup=0",
    "data.workers=0",
    "device=cpu",
    "plan=false",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `long` come first, so that no worker has one of them left when the others have ended."""
    items.sort(key=lambda item: not item.get_closest_marker("long"))


def pytest_collection_finish() -> None:
    """All modules are loaded and stay, so the garbage collector need not look at them again."""
    del sys.modules["wandb"]
    # torch.distributed.checkpoint notes every tensor, and pytest would format each note.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.INFO)
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the collector free the rest, which Triton's bindings would print at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """Starts before the first test: no thread has begun, and its output is pytest's already."""
    import torch

    # No fork could use what this process has begun with a device; and from 3.14 on the server wants a key.
    if torch.cuda.is_available() or sys.version_info >= (3, 14):
        start_a_server()
    else:
        if "TRITON_INTERPRET" not in os.environ:  # with it one file runs, whose ranks are forks of pytest
            warm_up()
        fork_a_server()


@pytest.fixture(autouse=True)
def composed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Presets are composed once for all tests, but for slow ones and those that use `hydra_itself`."""
    if "hydra_itself" in request.fixturenames or request.node.get_closest_marker("slow"):
        yield
        return
    from tests.support.composing import compose_once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipscale.cli.compose.compose_config", compose_once)
        yield


@pytest.fixture
def hydra_itself() -> None:
    """Hydra composes the commands of the test from their words, as for users."""


Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two shards of 24 samples, as a brace list."""
    from tests.data.files import write_shards

    paths = write_shards(tmp_path_factory.mktemp("shards"), [24, 24])
    stem = str(paths[0])[: -len("0.tar")]
    return f"{stem}{{0..1}}.tar"


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that all of pytest's workers share. The first one makes it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / name).exists():
            make(root / name)
    return root / name


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from clipscale.tools.data.demo import render_demo

    return shared(tmp_path_factory, "demo", lambda folder: render_demo(folder, 640))


@pytest.fixture(scope="session")
def finished(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, to which others are compared. Each of pytest's workers has a copy."""
    from clipscale.config.sections import EvalConfig, LogConfig
    from clipscale.train import train
    from tests.support.runs import ten_step_config

    def make(run: Path) -> None:
        sets = EvalConfig(every=5, sets=[str(demo / "objects"), str(demo / "retrieval")], limit=64)
        result = train(ten_step_config(demo, run, eval=sets, log=LogConfig()))
        assert result["step"] == 10
        assert set(result["eval"]) == {"objects (limit 64)", "retrieval (limit 64)"}

    made = shared(tmp_path_factory, "finished", make)
    return shutil.copytree(made, tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def s3() -> Iterator[str]:
    """An S3-compatible server with a bucket `bucket`; yields its address."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server")
    file_systems = pytest.importorskip("s3fs").S3FileSystem
    file_systems.clear_instance_cache()
    names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    url = "http://{}:{}".format(*served.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "AWS_ENDPOINT_URL": url, "NO_PROXY": "127.0.0.1"}.items():
            patch.setenv(name, value)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
        yield url
    served.stop()
    file_systems.clear_instance_cache()  # it remembers the address and the keys, for tests that come after


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder of a short path, for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def environment() -> dict:
    """The environment of a command a user types: none of torchrun's variables."""
    rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in rank and not key.startswith("TORCHELASTIC")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env
