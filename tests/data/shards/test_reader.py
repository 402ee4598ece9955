"""A shard has the samples that webdataset reads, and the members that tarfile reads; damage has a reason."""

import gzip
import math
import os
import random
import tarfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import tarfile_samples

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.loader import shard_reader
from clipscale.data.order import Segment
from clipscale.data.sample import IMAGE_TYPES, RawSample, size_limits_of
from clipscale.data.shards import index
from clipscale.data.shards.counts import count_samples
from clipscale.data.shards.index import scan_shard
from clipscale.data.shards.subset import SampleTable
from clipscale.data.shards.unusable import why_unusable
from clipscale.eval.sets.shards import load_pairs
from clipscale.tools.data.check import check_shard
from tests.conftest import Capture
from tests.data.files import Members, link, picture, sample, write_shards, write_tar
from tests.data.streams import flat, ids, items_of, open_stream, read, sample_id
from tests.support.cases import slow_except


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
    """A shard of ten samples that is cut off, overwritten in the middle, or replaced by something else."""
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


def named(names: str) -> Members:
    """Members of one key, by their extensions; each picture and text says its place."""
    content = {"jpg": picture, "txt": lambda place: f"text {place}".encode(), "json": lambda place: b"{}"}
    content["note"] = content["txt"]
    return [(f"x.{name}", content[name](place)) for place, name in enumerate(names.split())]


# The extensions of members of one key, and each sample that they are: the places of its picture and its text, or its
# reason.
REPEATED = {
    "jpg txt " * 3: [(0, 1), (2, 3), (4, 5)],
    "jpg txt json jpg json txt": [(0, 1), (3, 5)],
    "txt jpg txt jpg": [(1, 0), (3, 2)],
    "jpg jpg txt": ["no_caption", (1, 2)],
    "jpg txt txt": ["repeated_member"],
    "jpg jpg txt txt": ["no_caption", "repeated_member"],
    "jpg txt txt jpg txt": ["repeated_member", (3, 4)],
    "txt jpg jpg txt": ["repeated_member", "no_image"],
    "jpg note note txt": [(0, 3)],
}


# The ordinary suite has each reason, and each way in which members repeat.
ORDINARY = [*REPEATED.items()][:2] + [*REPEATED.items()][5:8]


@pytest.mark.parametrize(("names", "expected"), slow_except(ORDINARY, REPEATED.items()), ids=REPEATED)
def test_a_member_that_repeats_begins_a_sample_or_is_counted(
    tmp_path: Path, capsys: Capture, names: str, expected: list[Any]
) -> None:
    """Training, check, index and evaluation agree, with an index and without; each sample comes or has a reason."""
    content = named(names)
    path = write_tar(tmp_path / "0.tar", [*content, *sample("y")])
    reasons = Counter(each for each in expected if isinstance(each, str))
    good = {content[each[1]][1].decode(): content[each[0]][1] for each in expected if not isinstance(each, str)}
    entry = scan_shard(str(path))
    assert entry.samples == len(expected) + 1
    for _ in range(2):
        findings = check_shard(str(path), DataConfig())
        assert findings.samples == len(expected) + 1 and findings.broken == reasons
        raws, _ = read(path, offsets=index.sample_offsets, size_limits=size_limits_of(IMAGE_TYPES, ["txt"]))
        assert {raw.members["txt"].decode(): raw.members["jpg"] for raw in raws[:-1] if len(raw.members) == 2} == good
        for number, raw in enumerate(raws):
            (alone,) = [
                each
                for each in read(
                    path, offsets=index.sample_offsets, reads_content=lambda n, number=number: n == number
                )[0]
                if each.index == number
            ]
            assert alone.members.get("jpg") == raw.members.get("jpg") or alone.error == "repeated_member"
        assert main(["data", "index", str(path)]) == 0
        assert f"{len(expected) + 1} samples in 1 shard" in capsys.readouterr().out
    pairs = load_pairs(tmp_path, [path])
    usable = {answer[0]: image.read() for image, answer in zip(pairs.images, pairs.answers) if not image.defect}
    assert usable == good | {"caption y": picture()} and len(pairs.images) == len(expected) + 1
    with open_stream(path, batch=1, shard_streams=1, shuffle=0) as stream:
        seen = ids(stream, len(good) + 1)
    assert Counter(flat(seen))[sample_id(str(path), "x")] == len(good) and stream.broken == reasons


def test_an_index_of_an_earlier_version_is_said_and_its_wrong_samples_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight pairs of one key were one sample. The others are read with its offsets. `data index` renews it."""
    path = write_tar(tmp_path / "0.tar", [*sample("a"), *named("jpg txt " * 8), *sample("b")])
    dict(index.update_indexes([str(path)]))
    (entry,) = index.read_entries([str(path)]).entries.values()
    offsets = index.unpack(index.scan_shard(str(path)).offsets or b"")
    with index._writing(tmp_path / index.INDEX_FILE) as base:
        old = (entry.version.removesuffix(index.RULE_MARK), 3, index.pack(offsets[[0, 1, 9, 10]].tolist()))
        base.execute("UPDATE shards SET version = ?, samples = ?, offsets = ?", old)
    assert count_samples([str(path)]) == [3] and "clipscale data index" in caplog.text
    raws, _ = read(path, offsets=index.sample_offsets)
    assert [(raw.key, raw.error) for raw in raws] == [("a", ""), ("x", "outdated_index"), ("b", "")]
    dict(index.update_indexes([str(path)]))
    assert count_samples([str(path)]) == [10]


# ---- links ----


SYMBOLIC = tarfile.SYMTYPE
LINKED = {  # links, and whether they are read
    "hard": (link("p/b.png", "p/a.png"), True),
    "hard with a dot": (link("p/b.png", "./p/a.png"), True),
    "symbolic": (link("p/b.png", "a.png", SYMBOLIC), True),
    "of another folder": (link("p/b.png", "../p/./a.png", SYMBOLIC), True),
    "to a later file": (link("p/b.png", "../z.png", SYMBOLIC), True),
    "to a link": (link("p/b.png", "../chain0", SYMBOLIC), True),
    "to itself": (link("p/b.png", "b.png", SYMBOLIC), False),
    "in a circle": (link("p/b.png", "../circle0", SYMBOLIC), False),
    "through too many": (link("p/b.png", "../long0", SYMBOLIC), False),
    "outside": (link("p/b.png", "/etc/passwd", SYMBOLIC), False),
    "above": (link("p/b.png", "../../../../p/a.png", SYMBOLIC), False),
    "to a folder": (link("p/b.png", "../p", SYMBOLIC), False),
    "to nothing": (link("p/b.png", ""), False),
    "to a name that comes twice": (link("p/b.png", "../twice.png", SYMBOLIC), False),
}


@pytest.mark.parametrize(("header", "read_too"), LINKED.values(), ids=LINKED)
def test_a_link_is_the_file_in_the_tar_or_a_reason(
    tmp_path: Path, capsys: Capture, header: tarfile.TarInfo, read_too: bool
) -> None:
    """Training, the check, the index and the evaluation agree on it."""
    content: list[Any] = [("p/a.png", picture(1)), ("p/a.txt", b"a"), header, ("p/b.txt", b"b"), ("z.png", picture(1))]
    content += [("twice.png", b""), ("twice.png", b""), link("circle0", "circle1"), link("circle1", "circle0")]
    content += [link("chain0", "chain1", SYMBOLIC), link("chain1", "p/a.png")]
    content += [link(f"long{n}", f"long{n + 1}") for n in range(12)] + [link("long12", "p/a.png")]
    path = write_tar(tmp_path / "0.tar", content)
    for _ in range(2):
        raws, problem = read(path, offsets=index.sample_offsets)
        assert problem.reason is None
        (raw,) = [raw for raw in raws if raw.key == "p/b"]
        assert (raw.members, raw.error) == (({"png": picture(1), "txt": b"b"}, "") if read_too else ({}, "link"))
        assert read_too or "tar -h --hard-dereference" in raw.detail
        dict(index.update_indexes([str(path)]))
    assert scan_shard(str(path)).samples == len(raws) == 5
    findings = check_shard(str(path), DataConfig())
    assert findings.broken["link"] == (not read_too) and findings.samples - findings.broken.total() == 1 + read_too
    pairs = load_pairs(tmp_path, [path])
    (image,) = [image for image, answers in zip(pairs.images, pairs.answers) if answers == ["b"]]
    assert image.defect == ("" if read_too else "link") and (not read_too or image.read() == picture(1))
    with open_stream(path, batch=1, shard_streams=1, shuffle=0) as stream:
        assert len(set(flat(ids(stream, 2)))) == 1 + read_too


def test_a_link_to_a_file_that_is_cut_off_ends_nothing_before_it(tmp_path: Path) -> None:
    late = [("z.png", random.Random(0).randbytes(9000))]
    path = write_tar(tmp_path / "0.tar", [link("b.png", "z.png"), ("b.txt", b"b"), *sample("c"), *late])
    path.write_bytes(path.read_bytes()[: -10240 - 4000])
    raws, problem = read(path)
    assert [raw.error for raw in raws[:2]] == ["link", ""] and problem.reason == "truncated_shard"


def test_a_gzipped_tars_links_are_counted(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", [*sample("a"), link("b.png", "a.png"), ("b.txt", b"b")])
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert [raw.error for raw in read(path)[0]] == ["", "link"]


@pytest.mark.parametrize("counted", [True, False])
def test_links_count_as_the_bytes_that_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Windows are the same from any start, and hold no more than others."""
    large = random.Random(0).randbytes(20_000)
    content: list[Any] = [("a.png", large)]
    content += [link(f"{i:02d}.png", "a.png") if i % 3 else (f"{i:02d}.png", b"x") for i in range(30)]
    path = write_tar(tmp_path / "0.tar", content)
    dict(index.update_indexes([str(path)]))
    monkeypatch.setattr(shard_reader, "WINDOW_BYTES", 90_000)
    count = 31 if counted else None
    segment = partial(Segment, 0, 0, stop=count, count=count)
    whole = [item.key for item in items_of(segment(start=0), str(path), window=16)]
    assert len(set(whole)) == 31
    assert set(whole[:7]) == {"a", *(f"{i:02d}" for i in range(6))}, "the first window closes early"
    for start in range(0, 31, 3):
        assert [item.key for item in items_of(segment(start=start), str(path), window=16)] == whole[start:], start


def test_a_cut_in_what_is_not_read_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*sample("a"), ("a.large", bytes(1 << 20))])
    path.write_bytes(path.read_bytes()[: 1 << 20])
    samples, problem = read(path, size_limits={"txt": 99})
    assert [s.key for s in samples] == ["a"] and problem.reason == "truncated_shard"


class Weights:
    """Stands for a subset's file: the weight of each key."""

    table = SampleTable(np.empty(0), has_uids=False)

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights

    def may_repeat(self, key: str) -> bool:
        return self.weights[key] > 1

    def weight(self, key: str, json_bytes: bytes) -> float:
        return self.weights[key]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = [member for key in "abcdef" for member in sample(key)]
    return write_tar(tmp_path_factory.mktemp("letters") / "a.tar", members)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0, 0.5, 1, 1.5, 2, 3.2]), min_size=6, max_size=6), st.sets(st.integers(0, 20)))
def test_a_listed_sample_comes_as_often_as_it_weighs_and_is_read_if_it_may_be_wanted(
    letters: Path, weights: list[float], wanted: set[int]
) -> None:
    expected = list[RawSample]()
    for raw, weight in zip(read(letters)[0], weights, strict=True):
        is_read = weight > 1 or len(expected) in wanted
        members = raw.members if is_read else {}
        for repeat in range(math.ceil(weight)):
            expected.append(
                replace(
                    raw,
                    index=len(expected),
                    members=members,
                    num_bytes=0 if repeat else raw.num_bytes,
                    repeat=repeat,
                    keep_probability=weight - repeat,
                )
            )
    actual, problem = read(letters, reads_content=wanted.__contains__, subset=Weights(dict(zip("abcdef", weights))))
    assert (actual, problem.reason) == (expected, None)


def test_only_wanted_members_are_read(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [6])[0]
    samples, _ = read(path, reads_content=lambda i: i % 2 == 1, size_limits={"txt": 99})
    assert [s.index for s in samples] == list(range(6))
    assert [sorted(s.members) for s in samples] == [[], ["txt"]] * 3


# ---- what a shard holds of which nothing is usable ----


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
        assert why_unusable(str(write_tar(tmp_path / "0.tar", content)), ["txt"]) == ""
