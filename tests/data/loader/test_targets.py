"""Keys and several captions of a sample: the same for every rank, worker and offload, and after a resume."""

import json
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest

from tests.data.files import picture, write_tar
from tests.data.streams import content, open_stream, positions

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards; three samples in a row share a url, and have as many captions as their place among them."""
    folder = tmp_path_factory.mktemp("families")
    for shard in range(2):
        members = []
        for i in range(30):
            captions = [f"{shard}{i:02d} {c}" for c in range(i % 3 + 1)]
            about = json.dumps({"url": f"u{i // 3}", "captions": captions}).encode()
            members += [(f"{i:02d}.png", picture(i)), (f"{i:02d}.json", about)]
        write_tar(folder / f"{shard}.tar", members)
    return folder


def read(folder: Path, steps: int, ranks: int = 1, **options: Any) -> tuple[list[Any], Any]:
    """Of each batch of all ranks: ids, keys, captions, pixels; and the position after them."""
    options = {"batch": 16, "shard_streams": 8, "same": "url", "captions": ["json:captions"], **options}
    streams = [open_stream(folder, rank=rank, world=ranks, **options) for rank in range(ranks)]
    batches = []
    for _ in range(steps):
        parts = []
        for batch in [stream.next_batch() for stream in streams]:
            ids, pixels, _ = content(batch)
            captions = [bytes(row.tolist()).decode().strip() for row in batch.tokens(0, len(batch) * batch.captions)]
            keys = batch.targets(batch.ids().device).keys
            assert keys is not None
            parts.append((ids, keys.tolist(), captions, pixels))
        batches.append(tuple(reduce(add, same) for same in zip(*parts)))
    where = positions(streams)
    for stream in streams:
        stream.close()
    return batches, where


def test_keys_follow_the_field_and_captions_their_sample(families: Path) -> None:
    one, several = (read(families, 4, captions_per_step=k)[0] for k in (1, 2))
    by_key: dict[int, set[str]] = {}
    for (ids, keys, first, pixels), (ids_again, keys_again, captions, pixels_again) in zip(one, several, strict=True):
        assert (ids, keys, pixels) == (ids_again, keys_again, pixels_again), "their number changes nothing else"
        assert captions[::2] == first
        for key, here, there in zip(keys, captions[::2], captions[1::2], strict=True):
            assert here[:3] == there[:3], "of one sample"
            assert (here == there) == (int(here[1:3]) % 3 == 0), "drawn twice only where there is no other"
            by_key.setdefault(key, set()).add(str(int(here[1:3]) // 3))
    assert len(by_key) == 10 and all(len(urls) == 1 for urls in by_key.values())


@pytest.mark.parametrize(
    "options",
    [{"ranks": 2}, {"ranks": 3, "batch": 18}, {"workers": 2}, {"backend": "disk", "chunk": 5}, {"backend": "encoded"}],
    ids=str,
)
def test_they_do_not_depend_on_who_reads_them_or_where_rows_wait(families: Path, options: dict[str, Any]) -> None:
    given = {"captions_per_step": 3, "batch": options.get("batch", 16)}
    whole, _ = read(families, 4, **given)
    first, position = read(families, 2, **given | options)
    assert first == whole[:2]
    assert read(families, 2, position=position, **given | options)[0] == whole[2:]
