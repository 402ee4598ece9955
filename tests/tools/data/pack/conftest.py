"""Pictures to pack."""

from pathlib import Path

import pytest
from PIL import Image

from tests.eval.sets import COLOURS, NAMES

SUFFIXES = ["png", "jfif", "webp", "JPG", "jpe", "mpo"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder `in` with a picture of each colour in a folder below it, of several kinds. Phones write MPO."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    more = {"save_all": True, "append_images": [Image.new("RGB", (24, 12))]}
    for name, suffix in zip(NAMES, SUFFIXES):
        kind = "MPO" if suffix in ("JPG", "mpo") else Image.registered_extensions()[f".{suffix}"]
        image = Image.new("RGB", (24, 12), COLOURS[name])
        image.save(folder / "deep" / f"{name}.{suffix}", kind, **(more if kind == "MPO" else {}))
    return folder
