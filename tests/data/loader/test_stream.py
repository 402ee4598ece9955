"""The stream: the same batches for any number of ranks and workers, exact epochs, and an error instead of a hang."""

import io
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clipscale.common import files
from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.data.loader.host_batch import Arena, HostBatch
from clipscale.data.loader.open_stream import order_shards, worker_count
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.data.order import BatchShare
from clipscale.data.shards.requests import SourceError
from clipscale.data.shards.store import Store
from tests.data.files import HUGE, Letters, Words, picture, sample, write_shards, write_tar
from tests.data.streams import all_ids, content, contents, flat, ids, inline_workers, open_stream, sample_id
from tests.support.user_errors import refused

TABLES = files.read_yaml(Path(__file__).with_name("stream.yaml"))


def test_batches_do_not_depend_on_workers(tmp_path: Path) -> None:
    write_shards(tmp_path, [30, 20, 50])
    options = {"batch": 60, "augment": AugmentConfig(scale=(0.3, 1.0), flip=0.5)}
    with open_stream(tmp_path, **options) as alone, open_stream(tmp_path, workers=3, **options) as shared:
        for step in range(6):
            assert contents(shared, 1) == contents(alone, 1), f"step {step}"
            assert shared.position() == alone.position()
        assert shared.broken == alone.broken


def test_the_upcoming_batch_is_the_next_one(tmp_path: Path) -> None:
    """The ranks tell each other its numbers while the step before it runs."""
    write_shards(tmp_path, [30, 20, 50])
    with open_stream(tmp_path, batch=20, workers=1) as stream:
        for _ in range(3):
            stream.next_batch().sameness_keys()
            until = time.monotonic() + 120
            while not (upcoming := stream.upcoming()) and time.monotonic() < until:
                time.sleep(0.01)
            assert upcoming
            announced = content(upcoming)
            batch = stream.next_batch()
            assert batch is upcoming and announced == content(batch)


def test_workers_read_while_the_memory_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking 40 GiB takes a rank twenty seconds: the first samples are there by then."""
    write_shards(tmp_path, [30, 30])
    arrived: list[bool] = []

    def pin(arena: Arena) -> None:
        until = time.monotonic() + 120
        while not (pixels := arena.slots[0]["pixels"].any()) and time.monotonic() < until:
            time.sleep(0.01)
        arrived.append(bool(pixels))

    monkeypatch.setattr(Arena, "pin", pin)
    with open_stream(tmp_path, batch=16, workers=1, gpu=True):
        assert arrived == [True]


def test_rows_carry_what_the_shard_holds(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [20])
    batch = open_stream(tmp_path, batch=10, augment=AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))).next_batch()
    keys = {sample_id(str(paths[0]), f"00000{i:04d}"): i for i in range(20)}
    for row, name in enumerate(batch.sameness_keys().tolist()):
        index = keys[name]
        pixels = np.asarray(Image.open(io.BytesIO(picture(index % 7)))).transpose(2, 0, 1)
        assert np.array_equal(batch.pixels(row, row + 1)[0].numpy(), pixels)
        assert torch.equal(batch.tokens(row, row + 1), Letters()([f"caption 00000{index:04d}"]).int())


def test_keys_follow_the_field(tmp_path: Path) -> None:
    """Three neighbouring samples share a url."""
    members = []
    for i in range(30):
        about = {"url": f"u{i // 3}"}
        members += [(f"{i:02d}.png", picture(i)), (f"{i:02d}.json", json.dumps(about).encode())]
        members.append((f"{i:02d}.txt", f"{i:02d}".encode()))
    write_tar(tmp_path / "0.tar", members)
    stream = open_stream(tmp_path, batch=16, shard_streams=8, same="url")
    by_key: dict[int, set[int]] = {}
    for _ in range(6):
        batch = stream.next_batch()
        for key, number in zip(batch.sameness_keys().tolist(), texts(batch), strict=True):
            by_key.setdefault(key, set()).add(int(number) // 3)
    assert len(by_key) == 10 and all(len(urls) == 1 for urls in by_key.values())


def texts(batch: HostBatch) -> list[str]:
    return [bytes(row.tolist()).decode().strip() for row in batch.tokens(0, batch.num_texts)]


@pytest.mark.parametrize(("pad", "first"), [(0, (Words.START,)), (Words.END, (Words.START,)), (Words.END, ()), (0, ())])
def test_a_caption_keeps_its_end_token_in_its_chunk(tmp_path: Path, pad: int, first: tuple[int, ...]) -> None:
    """transformers' tokenizers of CLIP and SigLIP pad with their end token; SigLIP's and T5's have no first one."""
    members = []
    for i in range(24):
        members += [(f"{i:02d}.png", picture(i)), (f"{i:02d}.txt", " ".join(["a"] * (i + 1)).encode())]
    write_tar(tmp_path / "0.tar", members)
    options = {"shard_streams": 1, "shuffle": 0, "tokenizer": Words(20, pad, first)}
    with open_stream(tmp_path, batch=24, **options) as stream:
        batch = stream.next_batch()
        assert batch.lengths().tolist() == [min(len(first) + words + 1, 20) for words in range(1, 25)]
        captions = SortedTexts(
            batch.tokens, batch.lengths, 24, batch.context_length, torch.device("cpu"), stays_on_device=False
        )
        chunks = [captions.chunk(*span) for span in captions.spans(1)]
    assert {chunk.shape[1] for chunk in chunks} == {8, 16, 20}
    assert all((chunk == Words.END).any(1).all() for chunk in chunks)


def test_several_texts_of_a_sample_change_nothing_else(tmp_path: Path) -> None:
    """Samples have one to three captions, and as many hard negatives."""
    members = []
    for i in range(30):
        captions = [f"{i:02d} {c}" for c in range(i % 3 + 1)]
        about = {"captions": captions, "hard": [f"{text} no" for text in captions]}
        members += [(f"{i:02d}.png", picture(i)), (f"{i:02d}.json", json.dumps(about).encode())]
    write_tar(tmp_path / "0.tar", members)
    options = {"batch": 16, "shard_streams": 8, "captions": ["json:captions"]}
    more = {"captions_per_step": 2, "negatives": "json:hard", "negatives_per_step": 2}
    one = open_stream(tmp_path, **options)
    several = open_stream(tmp_path, **options, **more)
    for _ in range(6):
        first = one.next_batch()
        batch = several.next_batch()
        assert content(first)[:2] == content(batch)[:2]
        captions = texts(batch)[:32]
        negatives = texts(batch)[32:]
        assert texts(first) == captions[::2], "the first is what a run with one caption draws"
        for own in zip(captions[::2], captions[1::2], negatives[::2], negatives[1::2], strict=True):
            assert len({text[:2] for text in own}) == 1, "of one sample"
            assert [text.endswith("no") for text in own] == [False, False, True, True]


@pytest.mark.parametrize("case", TABLES["pinned"], ids=lambda case: case["order"])
def test_which_sample_and_which_of_its_texts_comes_when_is_pinned_down(tmp_path: Path, case: dict) -> None:
    """A change here changes the order of every run that goes on from a checkpoint."""
    for shard in "ab":
        members = []
        for i in range(16):
            about = {"captions": [f"{shard}{i}{c}" for c in "klmn"], "hard": [f"{shard}{i}{c}" for c in "wxyz"]}
            members += [(f"{i}.png", picture(i)), (f"{i}.json", json.dumps(about).encode())]
        write_tar(tmp_path / f"{shard}.tar", members)
    options = {"train": [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"], "weights": [1.0, 2.0]}
    if case["order"] != "weights":
        options = {"order": case["order"]}
    options |= {"captions": ["json:captions"], "negatives": "json:hard", "negatives_per_step": 1}
    stream = open_stream(tmp_path, batch=4, seed=1, shard_streams=2, **options)
    assert [" ".join(texts(stream.next_batch())) for _ in range(4)] == case["texts"]


# ---- exact epochs ----


@settings(max_examples=4)
@given(
    st.lists(st.integers(0, 25), max_size=6),
    st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 9)),
    st.integers(0, 12),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_an_epoch_has_every_sample_once_whoever_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    ranks: tuple[int, int],
    shuffle: int,
    workers: int,
    seed: int,
) -> None:
    """An epoch has whole batches here, so that the last one ends it."""
    world, per_rank = ranks
    batch = world * per_rank
    sizes = [*sizes, batch + -sum(sizes) % batch]
    folder = tmp_path_factory.mktemp("shards")
    paths = write_shards(folder, sizes)
    options = {"batch": batch, "world_size": world, "shuffle": shuffle, "seed": seed, "workers": workers}
    with inline_workers(seed):
        streams = [open_stream(folder, rank=rank, **options) for rank in range(world)]
    for epoch in range(2):
        steps = sum(sizes) // batch
        assert Counter(flat(flat(ids(stream, steps)) for stream in streams)) == all_ids(paths, sizes), epoch


def test_shuffling_mixes_within_the_window_and_zero_keeps_the_order(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [40])[0]
    keys = {sample_id(str(path), f"00000{i:04d}"): i for i in range(40)}
    plain, windowed = (
        [keys[i] for i in ids(open_stream(tmp_path, batch=40, shard_streams=1, shuffle=n), 1)[0]] for n in (0, 10)
    )
    assert plain == list(range(40)) != windowed
    assert [sorted(windowed[i : i + 10]) for i in range(0, 40, 10)] == [plain[i : i + 10] for i in range(0, 40, 10)]


# ---- which order ----


def test_uncounted_local_shards_are_scanned_when_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path, [3, 4, 5])
    with monkeypatch.context() as patch:
        patch.setattr("clipscale.data.shards.counts.SCAN_AT_MOST", 2)
        assert open_stream(tmp_path, batch=4).epoch_samples is None
    assert "drawn with replacement" in caplog.text
    assert open_stream(tmp_path, batch=4).epoch_samples == 12


# ---- dirty data ----

BROKEN = {
    "no_image": [("k.txt", b"words")],
    "no_caption": [("k.png", picture())],
    "dot_in_key": [("k.2024.png", picture()), ("k.2024.txt", b"words")],
    "empty_image": [("k.png", b""), ("k.txt", b"words")],
    "unreadable_image": [("k.jpg", picture(0, (40, 40), "JPEG")[:-200]), ("k.txt", b"words")],
    "huge_image": [("k.png", HUGE), ("k.txt", b"words")],
    "too_large": [("k.png", bytes(30_000)), ("k.txt", b"words")],
}


@pytest.mark.parametrize("reason", BROKEN)
def test_broken_samples_are_counted_by_reason_and_passed_over(
    tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipscale.data.sample.MAX_IMAGE_BYTES", 29_000)
    members = [(f"{i:03d}{name[1:]}", data) for i in range(3) for name, data in BROKEN[reason]]
    path = write_tar(tmp_path / "x.tar", [*sample("a"), *members, *sample("b")])
    stream = open_stream(path, batch=2, shard_streams=1)
    good = Counter([sample_id(str(path), "a"), sample_id(str(path), "b")])
    assert [Counter(batch) for batch in ids(stream, 2)] == [good, good]
    assert set(stream.broken) == {reason} and 3 <= stream.broken[reason] <= 6, stream.broken


@pytest.mark.parametrize(
    ("reason", "order", "workers"),
    [("no_caption", "epochs", 0), ("unreadable_image", "epochs", 2), ("unreadable_image", "resampled", 0)],
)
def test_data_without_a_usable_sample_ends_with_the_reason(
    tmp_path: Path, reason: str, order: str, workers: int
) -> None:
    members = [(f"{i:03d}{name[1:]}", data) for i in range(8) for name, data in BROKEN[reason]]
    write_tar(tmp_path / "x.tar", members)
    with open_stream(tmp_path, batch=2, order=order, workers=workers) as stream:
        batch = stream.next_batch()
        with refused(rf"no usable sample.*{reason} \d+"):
            batch.pixels(0, 1)


@pytest.mark.parametrize(
    ("workers", "cores", "streams", "expected"),
    [(None, 8, 64, 7), (None, 1, 64, 1), (None, 8, 4, 4), (9, 2, 6, 6), (0, 8, 64, 0)],
)
def test_workers_leave_a_core_and_have_a_stream_each(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, cores: int, streams: int, expected: int
) -> None:
    monkeypatch.setattr("clipscale.data.loader.open_stream.cores_of_rank", lambda: cores)
    assert worker_count(DataConfig(workers=workers), streams) == expected


# ---- settings ----


@pytest.mark.parametrize(
    ("options", "message"),
    TABLES["refused"],
)
def test_settings_that_cannot_work_are_refused_in_one_line(tmp_path: Path, options: dict, message: str) -> None:
    write_shards(tmp_path, [25, 25])
    with refused(message):
        open_stream(tmp_path, **{"batch": 8, **options})


def test_streams_fit_the_batches_of_all_stages_unless_their_number_is_given(tmp_path: Path) -> None:
    """Given ones that do not fit are an error of the start, and are not replaced."""
    write_shards(tmp_path, [30, 20])
    share = BatchShare(60, 0, 1)
    for chosen, expected in ((None, 3), (12, 12)):
        config = DataConfig(train=[str(tmp_path)], shard_streams=chosen)
        shards = order_shards(config, share, 0, limit_streams=lambda num_streams: min(num_streams, 3))
        assert shards.order.num_streams == expected


@pytest.mark.parametrize("silent", [2, 3])
def test_a_run_ends_at_the_third_shard_in_a_row_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    write_shards(tmp_path, [5, 5, 5, 5, 5])
    asked: dict[str, int] = {}
    opened = Store.open

    def open_shard(store: Store, url: str) -> Any:
        if asked.setdefault(url, len(asked)) < silent:
            raise SourceError("unreachable_shard", "no answer")
        return opened(store, url)

    open_stream(tmp_path, batch=5, shard_streams=1).close()  # counts them, and keeps the counts
    monkeypatch.setattr(Store, "open", open_shard)
    with open_stream(tmp_path, batch=5, shard_streams=1) as stream:
        if silent < 3:
            stream.next_batch().pixels(0, 5)
            assert stream.broken == {"unreachable_shard": 5 * silent}  # all that they hold
        else:
            with refused("3 shards in a row cannot be reached"):
                stream.next_batch().pixels(0, 1)
