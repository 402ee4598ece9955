"""Two runs, an embedded set of the first, and the page's client."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.config.data import DataConfig
from clipscale.models.towers import build_model
from clipscale.tools.explore.search import open_explorer
from clipscale.tools.explore.settings import ExploreConfig
from tests.data.files import picture, write_tar
from tests.support.checkpoints import save_model
from tests.tools.embed.test_embed import embed
from tests.tools.eval.test_verb import TINY


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `a` and `b`, shards of 7 and 5 different pictures, and the features `of-a`."""
    root = tmp_path_factory.mktemp("explore")
    (root / "shards").mkdir()
    for shard, size in enumerate((7, 5)):
        members = []
        for i in range(size):
            key = f"{shard}{i:03d}"
            caption = f"<b>{key}</b> & a ring"
            members += [(f"{key}.png", picture(10 * shard + i, (40, 30))), (f"{key}.txt", caption.encode())]
        write_tar(root / f"shards/{shard:05d}.tar", members)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        save_model(root / name, build_model(TINY), TINY)
    embed(str(root / "a"), root / "shards", root / "of-a")
    return root


def config(place: Path, *folders: str, **values: Any) -> ExploreConfig:
    data = DataConfig(train=[str(place / folder) for folder in folders], **values.pop("data", {}))
    return ExploreConfig(**({"run": str(place / "a"), "device": "cpu", "data": data} | values))


def client(settings: ExploreConfig) -> Any:
    from starlette.testclient import TestClient

    from clipscale.tools.explore.server import application

    return TestClient(application(open_explorer(settings)), base_url="http://127.0.0.1:8765")


@pytest.fixture(scope="session")
def page(place: Path) -> Any:
    return client(config(place, "of-a"))
