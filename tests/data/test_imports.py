"""The folders of data/ import in one direction: loader, shards, data."""

import re

import pytest

from clipscale.config.presets import PACKAGE


@pytest.mark.parametrize(("folder", "above"), [("data", r"data\.(shards|loader)"), ("data/shards", r"data\.loader")])
def test_no_folder_of_data_imports_one_above_it(folder: str, above: str) -> None:
    for path in (PACKAGE / folder).glob("*.py"):
        found = re.search(rf"(from|import) clipscale\.{above}", path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"
