"""Decoding on the device in streams and runs: the memory of the pictures, decoding on arrival, and the same training."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from clipscale.common.errors import UserError
from clipscale.common.units import format_bytes
from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.config.tools import PlanConfig
from clipscale.config.train import TrainConfig, check
from clipscale.data.loader import gpu_decode as on
from clipscale.data.loader.gpu_decode import DeviceDecoder, Torchvision, jpeg_decoder
from clipscale.data.loader.host_batch import Layout, Slot, Stopwatch
from clipscale.data.loader.memory import HEADROOM, fitted
from clipscale.data.loader.prefetch import Prefetcher, ThreadLoader
from clipscale.data.loader.stream import merge_positions
from clipscale.data.tools.demo import paths
from clipscale.plan import memory
from clipscale.train import train
from tests.data.files import Members, picture, write_tar
from tests.data.loader.ondevice import ROW, SIDE, SQUARE, Kept, damaged, distance, jpeg
from tests.data.streams import open_stream
from tests.support.runs import curve, settings

pytestmark = pytest.mark.timeout(60)
SLOTS = Slot(0, {}), Slot(1, {})


# -- memory ------------------------------------------------------------------------------------------------------------


@bounded(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.floats(1, 2))
def test_large_pictures_stay_encoded_while_the_pool_can_hold_the_pixels_of_all_others(
    kinds: list[int], factor: float
) -> None:
    """A pool that holds the pixels of all pictures is never too small, and is used fully."""
    sizes = [sample_of(kind) for kind in kinds]
    pool = int(factor * len(kinds) * ROW)
    kept = Kept(sizes, SQUARE, pool=pool)
    end = 0
    for place, (data, recipe) in enumerate(zip(sizes, kept.recipes())):
        assert recipe.begin == end
        left = (len(sizes) - place - 1) * ROW
        stays = data.startswith(b"\xff") and (len(data) < ROW or end + len(data) + left < pool)
        assert bool(recipe.size) == stays, (place, recipe, len(data), pool - end - left)
        end += recipe.size or ROW
    assert end <= pool
    assert torch.equal(kept.rows(Torchvision(torch.device("cpu"))), kept.rows(Torchvision(torch.device("cpu"))))


def sample_of(kind: int) -> bytes:
    """JPEGs of about a half, twice, and five times the bytes of their pixels, and a PNG."""
    if kind == 3:
        return picture(1, (9, 9))
    noise = np.random.default_rng(kind).integers(0, 256, ((16, 48, 80)[kind],) * 2 + (3,), np.uint8)
    return simplejpeg.encode_jpeg(noise, quality=(80, 60, 70)[kind])


def test_the_pool_follows_the_mean_size_of_a_picture() -> None:
    layout = Layout(2, 100, (3, SIDE, SIDE), 8, backend="device")
    gib = 2**30
    small, message = fitted(layout, 500.0, gib)
    assert small.pool == 100 * ROW and "data.decode=gpu, 2 x 100 samples need 144.2 KiB" in message, message
    large, message = fitted(layout, 3.0 * ROW, gib)
    assert large.pool == 100 * int(HEADROOM * 3 * ROW)
    assert f"need {large.memory_bytes(3.0 * ROW) / 2**20:.1f} MiB" in message, message
    tight, _ = fitted(layout, 3.0 * ROW, int(1.5 * 2 * 100 * ROW))
    assert 100 * ROW < tight.pool < large.pool, "less memory than the pictures would take: some wait as pixels"
    with pytest.raises(UserError, match=r"data\.decode=gpu: 2 x 100 samples need .*take offload=encoded, data"):
        fitted(layout, 3.0 * ROW, 2 * 100 * ROW)


@pytest.mark.parametrize("offload", ["none", "host", "encoded"])
def test_the_plan_counts_the_memory_that_a_run_states(
    cpu: torch.device, mixed: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    backend = "encoded" if offload == "encoded" else "host"
    monkeypatch.setattr("clipscale.data.loader.stream.picture_bytes", lambda *_: 2500.0)
    with open_stream(mixed, batch=64, side=SIDE, decode="gpu", device=cpu, workers=1, backend=backend) as stream:
        message = stream.memory
    data = DataConfig(decode="gpu", workers=1)
    config = PlanConfig(batch=64, data=data, offload=offload, gpus=1, image_bytes=2500)
    run: Any = SimpleNamespace(row=(3, SIDE, SIDE), row_type=torch.uint8, context_length=8)
    planned = memory.host_memory(config, run, 64, 32, cuda=False).process["batch"]
    assert f"need {format_bytes(planned)} of" in message, message


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_device_without_a_decoder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.decode=gpu: device=cpu has no decoder .*data\.decode=fast"):
        jpeg_decoder(torch.device("cpu"))
    monkeypatch.setattr(on, "require_gpu", lambda device: None)

    def without(files: Any, **_: Any) -> Any:
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    monkeypatch.setattr("torchvision.io.decode_jpeg", without)
    with pytest.raises(UserError, match=r"not compiled with nvJPEG support\); take data\.decode=fast"):
        jpeg_decoder(torch.device("cpu"))
    monkeypatch.setattr("torchvision.io.decode_jpeg", lambda files, **_: [torch.zeros(3, 16, 24, dtype=torch.uint8)])
    with pytest.raises(UserError, match=r"a picture came out as another"):
        jpeg_decoder(torch.device("cpu"))
    monkeypatch.delattr("torchvision.io.decode_jpeg")
    with pytest.raises(UserError, match=r"torchvision cannot decode JPEGs on cpu \(cannot import name"):
        jpeg_decoder(torch.device("cpu"))


def test_pixels_on_disk_and_decoding_on_the_device_exclude_each_other() -> None:
    config = TrainConfig(samples=100, data=DataConfig(train=["x.tar"], decode="gpu"))
    with pytest.raises(UserError, match=r"offload=disk .*with data\.decode=gpu take offload=encoded, or offload=host"):
        check(replace(config, offload="disk"))


# -- decoded as they arrive --------------------------------------------------------------------------------------------


class Gated:
    """Replaces the row decoder's `load`. Pixels are the rows' own numbers; each call waits for the gate and is recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.gate, self.error = threading.Semaphore(0), ""

    def __call__(self, slot: Slot, start: int, out: np.ndarray) -> None:
        assert self.gate.acquire(timeout=20), "never let through"
        self.calls.append((slot.number, start, start + len(out)))
        if self.error:
            raise RuntimeError(self.error)
        out[:, 0] = 100 * slot.number + np.arange(start, start + len(out))

    def let(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()


@pytest.fixture
def ahead() -> Iterator[tuple[Prefetcher, Gated]]:
    decode, buffers = Gated(), np.zeros((40, 1), np.uint8)
    loader = ThreadLoader(decode, buffers, 1, Stopwatch())
    yield Prefetcher(buffers, 20, loader, piece=4), decode
    decode.let(50)
    loader.close()


def test_pieces_are_decoded_in_their_order_and_once(ahead: tuple[Prefetcher, Gated]) -> None:
    prefetcher, decode = ahead
    decode.let(100)
    for step in range(4):
        slot, other = SLOTS[step % 2], SLOTS[1 - step % 2]
        decode.calls.clear()
        prefetcher.open(slot)
        prefetcher.arrived(slot, 6, 18)
        prefetcher.arrived(other, 3, 18)
        for start, stop in ((0, 3), (3, 6), (6, 18), (0, 18), (17, 18)):
            if stop == 18:
                prefetcher.arrived(slot, 18, 18)
            rows = prefetcher.rows(slot, start, stop)[:, 0]
            assert rows.tolist() == [100 * slot.number + i for i in range(start, stop)]
        spans = [(0, 4), (4, 6), (6, 10), (10, 14), (14, 18)]
        assert decode.calls == [(slot.number, *span) for span in spans], decode.calls
        prefetcher.release(slot)


def test_the_next_batch_is_decoded_while_this_one_is_used(ahead: tuple[Prefetcher, Gated]) -> None:
    prefetcher, decode = ahead
    decode.let(2)
    prefetcher.arrived(SLOTS[0], 4, 4)
    prefetcher.arrived(SLOTS[1], 8, 20)
    prefetcher.open(SLOTS[0])
    assert prefetcher.rows(SLOTS[0], 0, 4)[:, 0].tolist() == [0, 1, 2, 3]
    deadline = time.monotonic() + 20
    while len(decode.calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert decode.calls == [(0, 0, 4), (1, 0, 4)], "nobody has asked for the second"


def test_what_goes_wrong_on_the_device_is_raised_where_rows_are_asked_for(ahead: tuple[Prefetcher, Gated]) -> None:
    prefetcher, decode = ahead
    decode.let(10)
    decode.error = "CUDA is gone"
    prefetcher.arrived(SLOTS[0], 4, 8)
    prefetcher.open(SLOTS[0])
    for call in (lambda: prefetcher.rows(SLOTS[0], 0, 2), lambda: prefetcher.release(SLOTS[0])):
        with pytest.raises(RuntimeError, match="CUDA is gone"):
            call()


# -- whole streams and runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alternating JPEGs and PNGs; some are cut off, and one turns out to be broken only when it is decoded."""
    members: Members = []
    for i in range(160):
        data = jpeg(picture(i, (50, 34), "PNG"), quality=97, subsampling=0) if i % 3 else picture(i, (40, 40))
        if i % 10 == 7:
            data = data[:-200]
        elif i == 31:
            data = damaged(data)
        members += [(f"{i}.{'jpg' if i % 3 else 'png'}", data), (f"{i}.txt", f"number {i}".encode())]
    return write_tar(tmp_path_factory.mktemp("mixed") / "0.tar", members)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("backend", ["host", "encoded"])
def test_a_stream_gives_the_same_samples_with_nearly_the_same_pixels(
    device: torch.device, mixed: Path, backend: str, workers: int
) -> None:
    options: dict[str, Any] = {"batch": 32, "side": SIDE, "augment": AugmentConfig(scale=(0.3, 1.0), flip=0.5)}
    with open_stream(mixed, **options) as host:
        expected = [(b.ids().clone(), b.tokens(0, 32).clone(), b.pixels(0, 32).clone()) for b in batches(host, 6)]
    with open_stream(mixed, **options, decode="gpu", device=device, backend=backend, workers=workers) as stream:
        assert "data.decode=gpu" in stream.memory
        for batch, (ids, tokens, pixels) in zip(batches(stream, 6), expected):
            first = torch.cat([batch.pixels(i, i + 8) for i in range(0, 32, 8)])
            again = torch.cat([batch.pixels(i, i + 8) for i in range(0, 32, 8)])
            assert first.device.type == ("cpu" if backend == "host" else device.type)
            assert torch.equal(first, again), "the passes saw other pixels"
            assert torch.equal(batch.ids()[:5], ids[:5]) and torch.equal(batch.tokens(0, 5), tokens[:5])
            if torch.equal(batch.ids(), ids):  # before the one whose place was given away
                assert max(distance(first.cpu(), pixels)) < 1.5
        assert stream.broken[on.GREY_IMAGE] == stream.seen[on.REFUSED] == 2, "once in each epoch"
        assert stream.broken["unreadable_image"] >= 10, "those that are cut off are passed over"


def batches(stream: Any, count: int) -> Any:
    return (stream.next_batch() for _ in range(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slot_is_not_filled_anew_while_the_device_reads_it(
    cpu: torch.device, mixed: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nobody has asked for its pixels."""
    same = []
    plain = DeviceDecoder.__call__

    def slowly(self: DeviceDecoder, slot: Slot, start: int, stop: int) -> torch.Tensor:
        before = slot["recipes"][start:stop].copy()
        time.sleep(0.1)
        same.append(np.array_equal(slot["recipes"][start:stop], before))
        return plain(self, slot, start, stop)

    monkeypatch.setattr(DeviceDecoder, "__call__", slowly)
    with open_stream(mixed, batch=16, side=SIDE, decode="gpu", device=cpu, workers=workers) as stream:
        for batch in batches(stream, 6):
            batch.ids()
    assert len(same) >= 5 and all(same), same


@pytest.mark.parametrize("backend", ["host", "encoded"])
def test_a_growing_batch_and_a_resumed_stream_have_the_same_pixels(
    cpu: torch.device, mixed: Path, backend: str
) -> None:
    sizes = (16, 16, 32, 48, 64)
    options: dict[str, Any] = {
        "batch": 64,
        "side": SIDE,
        "shard_streams": 16,
        "decode": "gpu",
        "device": cpu,
        "backend": backend,
    }

    def read(first: int, count: int, position: Any = None) -> tuple[list[torch.Tensor], Any]:
        """Batches first..first + count, and where the stream stands after them."""
        with open_stream(mixed, **options, sizes=lambda i: sizes[min(first + i, 4)], position=position) as stream:
            found = [batch.pixels(0, len(batch)).clone() for batch in batches(stream, count)]
            return found, merge_positions([stream.position()])

    whole, _ = read(0, 6)
    assert [len(pixels) for pixels in whole] == [16, 16, 32, 48, 64, 64]
    start, position = read(0, 3)
    rest, _ = read(3, 3, position)
    for step, (ours, theirs) in enumerate(zip(start + rest, whole, strict=True)):
        assert torch.equal(ours, theirs), f"batch {step}"


def test_nothing_is_left_open(cpu: torch.device, mixed: Path) -> None:
    def opened() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    for workers, backend in ((0, "encoded"), (0, "host"), (2, "host")):
        for number in range(4):
            options = {"decode": "gpu", "device": cpu, "workers": workers, "backend": backend}
            with open_stream(mixed, batch=16, side=SIDE, **options) as stream:
                stream.next_batch().pixels(0, 8)
            if not number:
                before = opened()
        assert opened() == before, f"{workers} workers: files and threads {before} -> {opened()}"


def test_loaders_have_no_use_for_the_devices_decoder() -> None:
    unwanted = {"torchvision", "clipscale.data.loader.gpu_decode"}
    code = f"import sys, clipscale.data.loader.workers; print(sorted({unwanted} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def augmented(demo: Path, run: Path, decode: str, **changes: Any) -> TrainConfig:
    augment = AugmentConfig(scale=(0.3, 1.0), flip=0.5)
    data = DataConfig(train=[paths(demo).train], workers=changes.pop("workers", 0), augment=augment, decode=decode)
    return settings(demo, run, data=data, **{"samples": 256, **changes})


@pytest.mark.parametrize(
    ("offload", "workers", "passes"),
    [("encoded", 0, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("host", 0, 1), ("none", 2, 1)))],
)
def test_a_run_learns_as_with_the_exact_pixels(
    device: torch.device,
    demo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    offload: str,
    workers: int,
    passes: int,
) -> None:
    decoded: list[int] = []
    plain = Torchvision.__call__
    monkeypatch.setattr(Torchvision, "__call__", lambda self, files: decoded.append(len(files)) or plain(self, files))
    where = {"device": device.type, "workers": workers}
    train(augmented(demo, tmp_path / "exact", "exact", offload="encoded", **where))
    train(augmented(demo, tmp_path / "gpu", "gpu", offload=offload, **where))
    exact, found = curve(tmp_path / "exact"), curve(tmp_path / "gpu")
    print(f"{device}: exact {exact}, gpu {found}")
    assert found == pytest.approx(exact, abs=0.01), "nearly the same pixels, another curve"
    assert 0 <= sum(decoded) - 256 * passes - 1 <= 128, "every picture once in each pass, one to try, two batches ahead"
