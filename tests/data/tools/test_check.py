"""`data check` counts by training's reasons, finds duplicates and damage, and writes a self-contained page."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipscale.cli.main import main
from clipscale.data.decode import Picture
from clipscale.data.tools import check
from tests.data.files import Members, picture, sample, write_shards, write_tar
from tests.data.streams import ids, open_stream

Captured = pytest.CaptureFixture[str]


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    out = tmp_path / "out"
    status = main(["data", "check", str(tmp_path / "set"), f"out={out}", "workers=1", *words])
    return status, json.loads((out / "check.json").read_text()), (out / "check.html").read_text()


DIRTY: Members = [*sample("good"), ("text.txt", b"no picture"), ("bare.png", picture())]
DIRTY += [("noise.png", b"\x89PNG noise"), ("noise.txt", b"x"), ("latin.png", picture()), ("latin.txt", b"caf\xe9")]
DIRTY += [("large.png", picture(size=(40, 40))), ("large.txt", b"x"), ("hollow.png", b""), ("hollow.txt", b"x")]


def test_a_sound_set_has_status_zero(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [5, 4], sized=False)
    status, found, page = run(tmp_path)
    assert status == 0
    assert (found["shards"], found["samples"], found["usable"], found["broken"]) == (2, 9, 9, {})
    assert found["shorter_side"] == dict.fromkeys(("min", "p05", "median", "p95", "max"), 4)
    assert found["caption_characters"]["median"] == len("caption 000000000")
    assert found["formats"] == {"png": 9} and found["index"] == {"missing": 2, "mismatch": {}}
    assert page.count("<figure>") == 9


def test_broken_samples_have_the_reasons_that_training_counts(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_tar(tmp_path / "set" / "0.tar", DIRTY)
    status, found, page = run(tmp_path, "max_pixels=1000")
    assert status == 1
    reasons = ("no_image", "no_caption", "unreadable_image", "caption_not_utf8", "huge_image", "empty_image")
    assert found["broken"] == dict.fromkeys(reasons, 1)
    stream = open_stream(tmp_path / "set", batch=1, max_pixels=1000)
    ids(stream, 3)
    assert set(stream.broken) == set(found["broken"])
    for name in ("text", "bare", "noise", "latin", "large", "hollow"):
        assert f"0.tar/{name}" in page


def test_a_damaged_shard_and_a_mismatched_index_are_broken(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "set", [8, 8, 8], sized=False)
    main(["data", "index", str(tmp_path / "set")])
    assert run(tmp_path)[1]["index"] == {"missing": 0, "mismatch": {}}
    about = paths[1].stat()
    data = bytearray(paths[1].read_bytes())
    data[-600] ^= 1  # in the padding, where only the checksum changes
    paths[1].write_bytes(data)
    os.utime(paths[1], ns=(about.st_atime_ns, about.st_mtime_ns))
    paths[2].write_bytes(paths[2].read_bytes()[:9000])
    status, found, _ = run(tmp_path)
    assert status == 1 and "truncated_shard" in found["damaged_shards"][str(paths[2])]
    assert "checksum" in found["index"]["mismatch"][str(paths[1])]
    assert "changed" in found["index"]["mismatch"][str(paths[2])]


def test_duplicates_are_found_and_can_be_blocked(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_tar(folder / "0.tar", [*sample("a", 1), *sample("b", 2), *sample("c", 1)])
    write_tar(folder / "1.tar", [*sample("b", 3)])
    status, found, _ = run(tmp_path, "near_duplicates=true")
    assert status == 0, "duplicates are no damage"
    assert found["duplicates"]["key"]["examples"] == [["0.tar/b", "1.tar/b"]]
    assert found["duplicates"]["bytes"]["examples"] == [["0.tar/a", "0.tar/c"]]
    assert ["0.tar/a", "0.tar/c"] in found["duplicates"]["look"]["examples"]
    names = tmp_path / "out" / "duplicates.txt"
    assert {"1.tar/b", "0.tar/c"} <= set(names.read_text().split())
    _, found, _ = run(tmp_path, f"filter.block_keys={names}")
    assert found["dropped"] == {"filter_blocked_key": 2} and found["usable"] == 2


def test_filtered_samples_are_counted_and_not_broken(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [6], sized=False)
    status, found, _ = run(tmp_path, "filter.min_side=5", "filter.fields=[similarity>=0.3]")
    assert status == 0 and found["dropped"] == {"filter_no_similarity": 6} and found["usable"] == 0


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    hostile = "<script>alert(1)</script>"
    write_tar(tmp_path / "set" / "0.tar", [(f"{hostile}.png", picture()), (f"{hostile}.txt", hostile.encode())])
    _, _, page = run(tmp_path)
    assert "<script" not in page and "&lt;script" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def test_the_random_sample_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [9, 8, 7], sized=False)
    _, one, page = run(tmp_path, "pictures=5")
    _, two, other = run(tmp_path, "pictures=5", "workers=2")
    assert page == other and page.count("<figure>") == 5
    assert one == two


def test_the_look_of_a_picture_survives_another_encoding() -> None:
    looks = [
        check.look(Picture(picture(3, (64, 48), kind, **options), 10**6).decode())
        for kind, options in (("PNG", {}), ("JPEG", {"quality": 95}), ("WEBP", {"quality": 95}))
    ]
    assert max(bin(looks[0] ^ other).count("1") for other in looks[1:]) <= 4
    assert bin(looks[0] ^ check.look(Picture(picture(4, (64, 48)), 10**6).decode())).count("1") > 10
    assert check.look(np.zeros((5, 5, 3), np.uint8)) != 0
