"""A shard's samples are those of webdataset, its members those of tarfile; damage has a reason."""

import gzip
import os
from pathlib import Path

import pytest
from webdataset.tariterators import tarfile_samples

from clipscale.common.errors import UserError
from clipscale.data.shards.index import scan_shard
from clipscale.data.shards.reader import unusable
from tests.data.files import Members, picture, sample, write_shards, write_tar
from tests.data.streams import open_stream, read


def test_samples_are_what_webdataset_groups(tmp_path: Path) -> None:
    members = [*sample("a"), ("b.seg.png", b"1"), ("b.TXT", b"2"), ("d.x/c.png", b"3"), ("__meta__", b"")]
    members += [("d.x/c.txt", b"4"), ("e", b"5"), ("../../etc/c.png", b"6"), ("__meta__/d.txt", b"7"), *sample("a")]
    path = write_tar(tmp_path / "x.tar", members)
    actual = tarfile_samples([{"url": str(path)}])
    reference = [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in actual]
    samples, problem = read(path)
    assert [(s.key, s.members) for s in samples] == reference and problem.reason is None
    assert scan_shard(str(path)).samples == len(reference) == 5


def harmed(data: bytes, kind: str) -> bytes:
    """A shard of ten samples, cut off or overwritten in the middle, or of something else."""
    packed = gzip.compress(data)
    half = len(packed) // 2
    kinds = {"cut": data[: 512 * 25 + 100], "cut between": data[: 512 * 24], "packed": packed[:half] + os.urandom(half)}
    return {**kinds, "empty": b"", "other": b"not a tar" * 1000}[kind]


@pytest.mark.parametrize("kind", ["cut", "cut between", "packed", "empty", "other", "none", "pipe"])
def test_a_damaged_shard_gives_what_comes_before_the_damage(tmp_path: Path, kind: str) -> None:
    path = write_shards(tmp_path, [10])[0]
    whole, problem = read(path)
    assert len(whole) == 10 and problem.reason is None
    if kind in ("none", "pipe"):
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
    else:
        path.write_bytes(harmed(path.read_bytes(), kind))
        assert scan_shard(str(path)).reason == read(path)[1].reason
    samples, problem = read(path)
    assert samples == whole[: len(samples)] and str(path) in problem.detail
    reasons = {"truncated_shard"} if samples else {"unreadable_shard", "truncated_shard"}
    assert problem.reason in reasons and bool(samples) >= kind.startswith("cut")


def test_a_repeated_member_is_ignored(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*sample("a"), ("a.txt", b"second"), *sample("b")])
    samples, problem = read(path)
    assert [s.key for s in samples] == ["a", "b"] and problem.reason is None
    assert samples[0].members["txt"] == b"caption a"


def test_a_cut_in_what_is_not_read_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*sample("a"), ("a.large", bytes(1 << 20))])
    path.write_bytes(path.read_bytes()[: 1 << 20])
    samples, problem = read(path, size_limits={"txt": 99})
    assert [s.key for s in samples] == ["a"] and problem.reason == "truncated_shard"


def test_only_wanted_members_are_read(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [6])[0]
    samples, _ = read(path, want=lambda i: i % 2 == 1, size_limits={"txt": 99})
    assert [s.index for s in samples] == list(range(6))
    assert [sorted(s.members) for s in samples] == [[], ["txt"]] * 3


# -- what a shard holds of which nothing is usable ---------------------------------------------------------------------


def members(picture_name: str, caption_name: str) -> Members:
    keys = [f"{number:06d}" for number in range(8)]
    pairs = [((picture_name.format(key), picture()), (caption_name.format(key), b"words")) for key in keys]
    return [member for pair in pairs for member in pair]


PAIRS = members("{}.png", "{}.txt")
UNUSABLE = {
    "other extensions": (
        members("{}.img", "{}.cap"),
        [".cap and .img", "KEY.jpg, .jpeg, .png", "data.captions is [txt]"],
    ),
    "apart": (PAIRS[::2] + PAIRS[1::2], ["hold .png, or .txt", "one after the other"]),
    "dots in keys": (members("www.a.com_{}.png", "www.a.com_{}.txt"), ["hold .a.com_000000.png", "first dot"]),
    "no extensions": (members("{}_png", "{}_txt"), ["hold no sample", "KEY.jpg", "first dot"]),
}


@pytest.mark.parametrize(("content", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_the_line_that_ends_a_run_says_what_its_samples_hold(tmp_path: Path, content: Members, said: list[str]) -> None:
    path = write_tar(tmp_path / "0.tar", content)
    with pytest.raises(UserError) as error, open_stream(path, batch=4) as stream:
        stream.next_batch().pixels(0, 4)
    assert [words for words in said if words not in str(error.value)] == [], error.value


def test_nothing_is_said_of_a_shard_with_a_pair_or_without_a_file(tmp_path: Path) -> None:
    for content in (members("{}.img", "{}.cap") + PAIRS[:2], []):
        assert unusable(str(write_tar(tmp_path / "0.tar", content)), ["txt"]) == ""
