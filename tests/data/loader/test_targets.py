"""Keys follow the field that samples share; several captions are those of their sample."""

import json
from pathlib import Path

from tests.data.files import picture, write_tar
from tests.data.streams import content, open_stream


def test_keys_follow_the_field_and_captions_their_sample(tmp_path: Path) -> None:
    """Three samples in a row share a url, and have as many captions as their place among them."""
    members = []
    for i in range(30):
        about = {"url": f"u{i // 3}", "captions": [f"{i:02d} {c}" for c in range(i % 3 + 1)]}
        members += [(f"{i:02d}.png", picture(i)), (f"{i:02d}.json", json.dumps(about).encode())]
    write_tar(tmp_path / "0.tar", members)
    options = {"batch": 16, "shard_streams": 8, "same": "url", "captions": ["json:captions"]}
    one, several = (open_stream(tmp_path, captions_per_step=k, **options) for k in (1, 2))
    by_key: dict[int, set[int]] = {}
    for _ in range(6):
        (first, alone), (batch, both) = ((b, content(b)) for b in (one.next_batch(), several.next_batch()))
        assert (alone[0], alone[1], alone[3]) == (both[0], both[1], both[3]), "their number changes nothing else"
        assert first.tokens(0, 16).equal(batch.tokens(0, 32)[::2])
        captions = [bytes(row.tolist()).decode().strip() for row in batch.tokens(0, 32)]
        keys = batch.targets(batch.ids().device).keys
        assert keys is not None
        for key, here, there in zip(keys.tolist(), captions[::2], captions[1::2], strict=True):
            assert here[:2] == there[:2], "of one sample"
            assert (here == there) == (int(here[:2]) % 3 == 0), "drawn twice only where there is no other"
            by_key.setdefault(key, set()).add(int(here[:2]) // 3)
    assert len(by_key) == 10 and all(len(urls) == 1 for urls in by_key.values())
