"""A run on several hosts starts only if all see its folder."""

from pathlib import Path

import torch

from clipscale.common.errors import UserError
from clipscale.distributed.world import World
from clipscale.start import shared_storage
from tests.support.ranks import run_ranks


def look(rank: int, world_size: int, *folders: Path) -> str:
    """What a rank of one folder each is told."""
    shared_storage.NOTICE_S = shared_storage.APPEARS_WITHIN_S = 0.1
    shared_storage.socket.gethostname = lambda: f"host{rank}"
    try:
        shared_storage.check_shared(folders[rank], World(rank, world_size, torch.device("cpu")))
    except UserError as error:
        return str(error)
    return ""


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
