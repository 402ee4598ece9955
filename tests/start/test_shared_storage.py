"""A run on several hosts starts only if all see its folder."""

from collections.abc import Callable
from pathlib import Path

import torch

from clipscale.common.errors import UserError
from clipscale.distributed.world import World
from clipscale.start import shared_storage
from clipscale.train import train
from tests.support.ranks import run_ranks
from tests.support.runs import four_step_config


def on_host(rank: int, start: Callable[[], object]) -> str:
    """The message at the start of a rank with a host of its own."""
    shared_storage.NOTICE_S = shared_storage.FOLDER_APPEARS_WITHIN_S = 0.1
    shared_storage.socket.gethostname = lambda: f"host{rank}"
    try:
        start()
    except UserError as error:
        return str(error)
    return ""


def look(rank: int, world_size: int, *folders: Path) -> str:
    world = World(rank, world_size, torch.device("cpu"))
    return on_host(rank, lambda: shared_storage.check_shared(folders[rank], world))


def start(rank: int, world_size: int, shards: str, *folders: Path) -> str:
    return on_host(rank, lambda: train(four_step_config(shards, folders[rank])))


def test_a_host_that_does_not_see_the_folder_is_named(tmp_path: Path) -> None:
    here, there, missing = tmp_path / "here", tmp_path / "there", tmp_path / "missing"
    here.mkdir()
    there.mkdir()
    for told in run_ranks(look, 3, here, there, missing):
        assert "2 of 3 processes, on host1, host2" in told and "that host0 has" in told
    assert {*tmp_path.rglob("*")} == {here, there}


def test_ranks_of_one_folder_start(tmp_path: Path) -> None:
    assert run_ranks(look, 2, tmp_path, tmp_path) == ["", ""]
    assert not [*tmp_path.iterdir()]


def test_a_run_whose_ranks_have_folders_of_their_own_is_refused(shards: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    there = tmp_path / "there"
    for message in run_ranks(start, 2, shards, here, there):
        assert "1 of 2 processes, on host1" in message and "that host0 has" in message
    assert not there.exists() and not (here / "config.yaml").exists(), "nothing has begun"
