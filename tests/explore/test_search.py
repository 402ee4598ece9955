"""The search finds the rows that a plain product over the whole set finds, tile by tile."""

import numpy as np
import pytest
import torch

from clipscale.explore import embedded
from clipscale.explore.embedded import nearest


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("tile", [1, 7, 1000])
def test_the_nearest_rows_are_those_of_the_whole_product(
    monkeypatch: pytest.MonkeyPatch, tile: int, dtype: type[np.floating]
) -> None:
    monkeypatch.setattr(embedded, "TILE", tile)
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((53, 8)).astype(dtype)
    query = torch.from_numpy(generator.standard_normal(8).astype(np.float32))
    scores = rows.astype(np.float32) @ query.numpy()
    wanted = np.argsort(-scores, kind="stable")
    for count in (1, 5, 53, 80):
        found = nearest([rows[:20], rows[20:20], rows[20:]], query, count)
        assert [row for row, _ in found] == wanted[:count].tolist()
        assert np.allclose([score for _, score in found], scores[wanted[:count]], atol=1e-6)


def test_of_equal_rows_the_first_is_first_and_rows_without_features_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded, "TILE", 2)
    one, missing = [1.0, 0.0], [np.nan, np.nan]
    rows = np.array([missing, one, one, missing, one], np.float32)
    assert nearest([rows], torch.tensor([1.0, 0.0]), 2) == [(1, 1.0), (2, 1.0)]
    assert nearest([rows], torch.tensor([1.0, 0.0]), 9) == [(1, 1.0), (2, 1.0), (4, 1.0)]
    assert nearest([], torch.tensor([1.0, 0.0]), 2) == []


def test_the_search_holds_one_tile_of_a_mapped_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "TILE", 4)
    sizes = []

    class Rows(np.ndarray):
        def __getitem__(self, key: object) -> object:
            found = super().__getitem__(key)
            sizes.append(len(found))
            return found

    nearest([np.zeros((10, 3), np.float16).view(Rows)], torch.zeros(3), 3)
    assert sizes == [4, 4, 2]
