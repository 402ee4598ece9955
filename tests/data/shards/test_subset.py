"""A run over a subset of full shards is the run over shards of the subset; samples come as often as they weigh."""

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.filters import Selection
from clipscale.data.hashing import utf8
from clipscale.data.loader import shard_reader
from clipscale.data.loader.stream import TrainStream
from clipscale.data.order import Segment
from clipscale.data.shards import index
from clipscale.data.shards.counts import count_if_quick
from clipscale.data.shards.subset import parquet_file, subset_of
from clipscale.tools.data.make_index import main as make_index
from clipscale.tools.data.settings import IndexSettings
from tests.data.files import picture, write_tar
from tests.data.streams import contents, flat, ids, inline_workers, items_of, open_stream, positions, sample_id

TABLES = files.read_yaml(Path(__file__).with_name("subset.yaml"))


def uid(shard: int, i: int) -> str:
    return f"{random.Random(f'{shard} {i}').getrandbits(128):032x}"


def write(folder: Path, names: dict[int, list[int]]) -> Path:
    """Writes each shard's samples with these numbers; some have captions that no run can use."""
    folder.mkdir()
    for shard, numbers in names.items():
        members = []
        for i in numbers:
            about = json.dumps({"uid": uid(shard, i)}).encode()
            members += [(f"{shard}-{i:02d}.png", picture(i)), (f"{shard}-{i:02d}.json", about)]
            members += [(f"{shard}-{i:02d}.txt", b"" if i % 7 == 0 else f"{shard} {i}".encode())]
        write_tar(folder / f"{shard}.tar", members)
    return folder


FULL = {0: [*range(30)], 1: [*range(21)], 2: [*range(44)], 3: [*range(5)]}
PART = {shard: [i for i in numbers if i % 3 == 0 and shard < 3] for shard, numbers in FULL.items()}


def weighed(file: Path, weights: dict[tuple[int, int], Any], column: str = "key") -> Path:
    """A table of weights by shard and number; all samples of the same shards have one."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (clipscale[parquet])")
    from pyarrow import parquet

    names = [uid(*s) if column == "uid" else f"{s[0]}-{s[1]:02d}" for s in weights]
    parquet.write_table(pyarrow.table({column: names, "weight": [*weights.values()]}), file)
    return file


def listed(file: Path, shift: int = 0) -> Path:
    """Write the file that lists the subset, by uid or by key. `shift`: how much later the listed samples are."""
    chosen = [(shard, i + shift) for shard, numbers in PART.items() for i in numbers]
    if file.suffix == ".parquet":
        every = [(shard, i) for shard, numbers in FULL.items() for i in numbers]
        return weighed(file, {s: float(s in chosen) for s in every}, file.stem)
    if file.suffix == ".npy":
        pairs = [(int(uid(*s)[:16], 16), int(uid(*s)[16:], 16)) for s in chosen]
        np.save(file, np.sort(np.array([*pairs, (1, 2)], "u8,u8")))
    else:
        file.write_text("\n".join(["none", *(f"{shard}-{i:02d}" for shard, i in chosen)]) + "\n")
    return file


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("keys.txt", "epochs"),
        ("key.parquet", "epochs"),
        ("uids.npy", "resampled"),
        # Another name changes nothing for an order.
        pytest.param("uid.parquet", "weights", marks=pytest.mark.slow),
        *(pytest.param(name, "epochs", marks=pytest.mark.slow) for name in ("uids.npy", "uid.parquet")),
        *(
            pytest.param(name, "resampled", marks=pytest.mark.slow)
            for name in ("keys.txt", "key.parquet", "uid.parquet")
        ),
        *(pytest.param(name, "weights", marks=pytest.mark.slow) for name in ("uids.npy", "keys.txt", "key.parquet")),
    ],
)
def test_a_subset_of_full_shards_is_the_shards_of_the_subset(tmp_path: Path, order: str, name: str) -> None:
    """A resume with the same list, written again, goes on in it. With another list the data is read from its start."""
    full = write(tmp_path / "full", FULL)
    part = write(tmp_path / "part", PART)
    file = listed(tmp_path / name)

    def opened(folder: Path, **options: Any) -> TrainStream:
        sources = {"train": [f"{folder}/[01].tar", f"{folder}/[23].tar"], "weights": [1.0, 2.0]}
        options |= sources if order == "weights" else {"order": order}
        return open_stream(folder, batch=8, shard_streams=4, **options)

    given = {"sample_weights" if file.suffix == ".parquet" else "only_keys": str(file)}
    make_index([str(full)], IndexSettings(**given))
    make_index([str(part)], IndexSettings())
    expected = contents(opened(part), 9)
    stream = opened(full, **given)
    assert contents(stream, 5) == expected[:5]
    position = positions([stream])
    for shift in (0, 1):
        listed(file, shift)
        make_index([str(full)], IndexSettings(**given))
        actual = contents(opened(full, **given, position=position), 4)
        assert actual == (contents(opened(full, **given), 4) if shift else expected[5:])
    assert order != "epochs" or stream.epoch_samples == sum(map(len, PART.values()))


def test_a_shard_or_list_that_changes_is_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = write(tmp_path / "full", FULL)
    file = listed(tmp_path / "keys.txt")
    count = lambda: open_stream(full, batch=4, only_keys=str(file)).epoch_samples  # noqa: E731
    assert count() == 32
    with monkeypatch.context() as patch:
        patch.setattr(index, "scan_shard", lambda *_: pytest.fail("scanned again"))
        assert count() == 32
    (full / "0.tar").unlink()
    assert count() == 22
    (full / "1.tar").write_bytes((full / "2.tar").read_bytes())
    assert count() == 30
    file.write_text("2-00\n2-01\n2-02\n2-03\n")
    assert count() == 8
    assert index.read_entries([str(full / "2.tar")], subset_of(DataConfig(only_keys=str(file)))).entries


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("a.npy", np.array([(2, 0), (1, 5)], "u8,u8"), "not in order"),
        ("a.npy", np.arange(4), r"int64 \(4,\), not rows of numpy's dtype\('u8,u8'\)"),
        ("a.npy", np.array([(1, 2)], "u8,u8"), "hold no sample that data.only_keys=.*a.npy lists"),
        ("a.txt", None, "hold no sample that data.only_keys=.*a.txt lists"),
        ("none.txt", None, "none.txt: cannot be read"),
        ("a.npy", b"", "a.npy: cannot be read"),
        ("a.npy", b"PK\5\6" + bytes(18), "a.npy: cannot be read"),  # an archive of arrays
        ("a.npy", b"\x93NUMPY\1\0\x10\x27" + b"-" * 9999 + b"1", "a.npy: cannot be read"),
    ],
)
def test_a_list_that_cannot_be_used_is_named(tmp_path: Path, name: str, rows: Any, message: str) -> None:
    full = write(tmp_path / "full", FULL)
    if isinstance(rows, bytes):
        (tmp_path / name).write_bytes(rows)
    elif rows is not None:
        np.save(tmp_path / name, rows)
    (tmp_path / "a.txt").write_text("other\n")
    with pytest.raises(UserError, match=message):
        open_stream(full, batch=4, only_keys=str(tmp_path / name))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_keys_are_read_by_the_byte_order_mark_of_their_file(tmp_path: Path, encoding: str) -> None:
    """Windows' editors and shells write such files."""
    full = write(tmp_path / "full", {0: [1, 2, 3, 4]})
    (tmp_path / "keys.txt").write_text("0-01\r\n0-03\r\n", encoding=encoding)
    with open_stream(full, batch=2, only_keys=str(tmp_path / "keys.txt")) as stream:
        assert stream.epoch_samples == 2


WEIGHTS = {(0, i): (0.0, 0.3, 0.7, 1.0, 2.6)[i % 5] for i in range(1, 30) if i % 7}
EPOCH = round(sum(WEIGHTS.values()))


def test_samples_come_as_often_as_they_weigh(tmp_path: Path) -> None:
    """Twice in every epoch and a third time in six of ten, in the same batches over any ranks, workers and resumes.
    Repeats have one key, and pixels of their own.
    """
    file = weighed(tmp_path / "w.parquet", WEIGHTS)
    write(tmp_path / "shards", {0: [i for _, i in WEIGHTS]})
    options: dict = {"batch": 8, "shard_streams": 4, "sample_weights": str(file), "shuffle": 10}
    alone = open_stream(tmp_path / "shards", **options | {"shard_streams": 1})  # several drift apart in long runs
    assert alone.epoch_samples == EPOCH
    epochs = 40
    counts = Counter(flat(ids(alone, epochs * EPOCH // 8)))
    assert not alone.broken
    for weight in {*WEIGHTS.values()}:
        alike = [sample_id("0.tar", f"{shard}-{i:02d}") for (shard, i), other in WEIGHTS.items() if other == weight]
        share = weight % 1
        for chosen in [*([sample] for sample in alike), alike]:
            draws = epochs * len(chosen)
            actual = sum(counts[sample] for sample in chosen)
            most = len(chosen) * weight + 4 * (draws * share * (1 - share)) ** 0.5
            assert abs(actual - draws * weight) <= most, f"weight {weight}: {actual} in {draws} draws"
    batches = contents(open_stream(tmp_path / "shards", **options), 20)
    ranks = [open_stream(tmp_path / "shards", rank=rank, world_size=4, **options) for rank in range(4)]
    several = zip(*(ids(each, 12) for each in ranks))
    assert [sorted(flat(parts)) for parts in several] == [sorted(keys) for keys, *_ in batches[:12]]
    resumed = open_stream(tmp_path / "shards", position=positions(ranks), **options)
    assert contents(resumed, 8) == batches[12:20]


MANY = {(0, i): (1.0, 2.0, 0.0, 2.5, 7.3)[i % 5] for i in range(1, 20) if i % 7}


@pytest.mark.parametrize(
    ("order", "column"),
    [
        ("epochs", "key"), ("resampled", "uid"),
        pytest.param("epochs", "uid", marks=pytest.mark.slow), pytest.param("resampled", "key", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_resume_at_every_place_goes_on_with_every_copy(tmp_path: Path, order: str, column: str) -> None:
    """Windows are smaller than the shard, so a sample's copies lie in two of them, and streams begin inside one. With
    two ranks or two workers, too. No sample is broken.
    """
    file = weighed(tmp_path / "w.parquet", MANY, column)
    write(tmp_path / "shards", {0: [i for _, i in MANY]})
    options: dict = {"batch": 4, "shard_streams": 4, "shuffle": 5, "sample_weights": str(file), "order": order}
    opened = partial(open_stream, tmp_path / "shards", **options)
    stream = opened()
    places = [positions([stream])]
    whole = []
    for _ in range(16):  # over an epoch
        whole += contents(stream, 1)
        places.append(positions([stream]))
    for place in range(14):
        resumed = opened(position=places[place])
        assert contents(resumed, 3) == whole[place : place + 3], place
        assert not resumed.broken, (place, resumed.broken)
    assert not stream.broken
    for place in (3, 8):
        ranks = [opened(rank=rank, world_size=2, position=places[place]) for rank in range(2)]
        parts = zip(*(ids(each, 4) for each in ranks))
        assert [sorted(flat(p)) for p in parts] == [sorted(keys) for keys, *_ in whole[place : place + 4]]
        with inline_workers(place):
            assert contents(opened(workers=2, position=places[place]), 4) == whole[place : place + 4]


@pytest.mark.parametrize("counted", [True, False])
def test_copies_behind_a_window_that_bytes_close_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """A window closes at a sample's first copy, so that the others begin the next one."""
    monkeypatch.setattr(shard_reader, "WINDOW_BYTES", 20_000)
    numbers = range(30)
    file = weighed(tmp_path / "w.parquet", {(0, i): 3.0 for i in numbers})
    path = write_tar(tmp_path / "0.tar", [(f"0-{i:02d}.png", bytes(10 if i % 7 else 30_000)) for i in numbers])
    subset = subset_of(DataConfig(sample_weights=str(file)))
    total = 3 * len(numbers)

    def keys(start: int) -> list[str]:
        segment = Segment(0, 0, start, total if counted else None, total if counted else None)
        items = items_of(segment, str(path), window=16, subset=subset)
        assert all(item.members for item in items), start
        return [item.key for item in items]

    whole = keys(0)
    assert len(whole) == total
    for start in range(total):
        assert keys(start) == whole[start:], start


def test_an_epoch_is_as_long_as_the_weights_of_the_samples_that_are_there(tmp_path: Path) -> None:
    """A table for all of a large set has another mix of weights. The planner and the index agree with the run."""
    there = {(0, i): 2.0 for i in range(8)} | {(1, i): 0.75 for i in range(8)}
    elsewhere = {(9, i): 0.5 for i in range(100)}
    full = write(tmp_path / "full", {0: [*range(9)], 1: [*range(8)]})
    file = str(weighed(tmp_path / "w.parquet", there | elsewhere))
    config = DataConfig(train=[str(full)], sample_weights=file)
    urls = [str(full / f"{number}.tar") for number in range(2)]
    assert count_if_quick(config, urls) == 22
    assert open_stream(full, batch=4, sample_weights=file).epoch_samples == 22
    make_index([str(full)], IndexSettings(sample_weights=file))
    assert [entry.expected_samples for entry in index.read_entries(urls, subset_of(config)).entries.values()] == [16, 6]
    assert open_stream(full, batch=4, sample_weights=file).epoch_samples == 22
    assert count_if_quick(config, urls) == 22


def test_repeats_have_one_key_and_others_have_their_own(tmp_path: Path) -> None:
    file = weighed(tmp_path / "w.parquet", {(0, i): 2.0 for i in range(1, 5)})
    write(tmp_path / "shards", {0: [1, 2, 3, 4]})
    stream = open_stream(tmp_path / "shards", batch=8, sample_weights=str(file), selection=Selection)
    [(keys, pixels, _)] = contents(stream, 1)
    assert sorted(Counter(keys).values()) == [2, 2, 2, 2]
    size = len(pixels) // 8
    assert len({pixels[i * size : (i + 1) * size] for i in range(8)}) > 4, "each repeat has its own crop"


@pytest.mark.parametrize(
    ("weights", "column", "message"),
    TABLES["unusable"],
)
def test_weights_that_cannot_be_used_are_named(tmp_path: Path, weights: list, column: str, message: str) -> None:
    write(tmp_path / "full", FULL)
    file = weighed(tmp_path / "w.parquet", {(0, i): weight for i, weight in enumerate(weights)}, column)
    with pytest.raises(UserError, match=f"data.sample_weights=.*w.parquet: .*{message}"):
        open_stream(tmp_path / "full", batch=4, sample_weights=str(file))


def test_a_table_of_more_rows_than_its_bytes_tell_apart_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"key": ["a"] * 10**6, "weight": [1.0] * 10**6}), tmp_path / "w.parquet")
    with pytest.raises(UserError, match="1,000,000 rows in"):
        parquet_file(tmp_path / "w.parquet")


def test_a_sample_whose_name_is_not_utf8_is_found_by_its_key(tmp_path: Path) -> None:
    """A table of weights has such a key with an escape, as `data select` writes it; a list of keys, or its bytes."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (clipscale[parquet])")
    from pyarrow import parquet

    keys = ["caf\udce9", "caf\u00e9", "tea"]
    members = [(f"{key}.{kind}", data) for key in keys for kind, data in (("png", picture()), ("txt", b"a cup"))]
    write_tar(tmp_path / "0.tar", members)
    weights, names, escaped = (str(tmp_path / name) for name in ("w.parquet", "keys.txt", "escaped.txt"))
    parquet.write_table(pyarrow.table({"key": [*map(utf8, keys)], "weight": [1.0, 1.0, 0.0]}), weights)
    Path(names).write_bytes("\n".join(keys[:2]).encode("utf-8", "surrogateescape"))
    Path(escaped).write_text("\n".join(map(utf8, keys[:2])))
    expected = {sample_id("0.tar", key) for key in keys[:2]}
    for given in ({"sample_weights": weights}, {"only_keys": names}, {"only_keys": escaped}):
        stream = open_stream(tmp_path, batch=2, shard_streams=1, **given)
        assert stream.epoch_samples == 2 and {*ids(stream, 1)[0]} == expected, given
