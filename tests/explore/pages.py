"""The page's model and set, and a client that asks it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale import checkpoint
from clipscale.config.data import DataConfig
from clipscale.config.sections import LaunchConfig
from clipscale.config.tools import ExploreConfig
from clipscale.explore import verb
from clipscale.models.towers import build_model
from tests.data.files import picture, write_tar
from tests.embed.test_embed import embed
from tests.eval.test_verb import TINY

HOME = "http://127.0.0.1:8765"


def random_run(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    checkpoint.save(folder, 7, {"model": build_model(TINY).state_dict(), "model_config": asdict(TINY)}, keep=0)
    return str(folder)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, two shards of 7 and 5 pictures, and their features by the first run. All pictures differ."""
    root = tmp_path_factory.mktemp("explore")
    for number, size in enumerate((7, 5)):
        members = []
        for i in range(size):
            key = f"{number}{i:03d}"
            members += [
                (f"{key}.png", picture(10 * number + i, (40, 30))),
                (f"{key}.txt", f"<b>{key}</b> & a ring".encode()),
            ]
        (root / "shards").mkdir(exist_ok=True)
        write_tar(root / f"shards/{number:05d}.tar", members)
    for number, name in enumerate("ab"):
        random_run(root / name, number)
    embed(str(root / "a"), root / "shards", root / "embedded")
    return root


def config(place: Path, *data: str, **values: Any) -> ExploreConfig:
    found = [str(place / one) for one in data]
    return ExploreConfig(
        **({"run": str(place / "a"), "device": "cpu"} | values),
        data=DataConfig(train=found),
        launch=LaunchConfig(threads=1),
    )


def client(settings: ExploreConfig) -> Any:
    from starlette.testclient import TestClient

    from clipscale.explore.server import application

    return TestClient(application(*verb.prepared(settings), settings), base_url=HOME)


@pytest.fixture(scope="session")
def page(place: Path) -> Any:
    return client(config(place, "embedded"))


def names(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["part"], row["row"]) for row in rows]
