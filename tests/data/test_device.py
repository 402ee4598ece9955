"""Pictures decoded on the device: the pixels of the CPU's decoder, the same in both passes, whatever the pictures are like.

Here the device is the CPU, and a CUDA device where there is one: all of it but the decoder and the kernels is the same.
"""

import io
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st
from PIL import Image

from clipscale.bench.data import photograph
from clipscale.config import TrainConfig, check
from clipscale.data import device as on
from clipscale.data.batch import Arena, Layout, Slot
from clipscale.data.colour import Colour
from clipscale.data.config import AugmentConfig, DataConfig
from clipscale.data.decode import BrokenSampleError, Crop, Picture, TrainTransform, resize, stored_box
from clipscale.data.demo import paths
from clipscale.data.device import DeviceDecoder, Torchvision, jpeg_decoder
from clipscale.data.order import Draws
from clipscale.data.room import HEADROOM, fitted
from clipscale.data.stream import merge_positions
from clipscale.data.tiers import GREY, Recipe, tier_of
from clipscale.errors import UserError
from clipscale.plan import memory
from clipscale.plan.config import PlanConfig
from clipscale.spelling import format_bytes
from clipscale.step import CacheConfig
from clipscale.train import train
from tests.data.files import Members, picture, write_tar
from tests.data.streams import open_stream
from tests.device import DEVICE, on_device
from tests.test_train import curve, demo, settings

__all__ = ["demo"]

pytestmark = pytest.mark.timeout(60)
SIDE = 24
SQUARE = TrainTransform(SIDE, (1.0, 1.0), (1.0, 1.0), 0.0, 10_000_000)
CROPPED = replace(SQUARE, scale=(0.05, 1.0), ratio=(0.5, 2.0), flip=0.5)


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=on_device, id="device")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(on, "require_gpu", lambda device: None)
    return torch.device(request.param)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(on, "require_gpu", lambda device: None)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def jpeg(data: bytes, **options: Any) -> bytes:
    """The picture again, as another JPEG."""
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, "JPEG", **{"quality": 92, **options})
    return out.getvalue()


def turned(data: bytes, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(data, exif=exif)


class Kept:
    """Pictures in a slot, as a loader leaves them."""

    def __init__(self, files: list[bytes], transform: TrainTransform, *, pool: int | None = None) -> None:
        self.files, self.transform = files, transform
        side = transform.side
        room = sum(map(len, files)) + len(files) * 3 * side**2 if pool is None else pool
        self.arena = Arena(Layout(1, len(files), (3, side, side), 8, tier="device", pool=room))
        self.slot: Slot = self.arena.slots[0]
        tier = tier_of(self.arena, transform, (0, len(files)))
        tier.begin(self.slot)
        for place, data in enumerate(files):
            tier.put(self.slot, place, data, Draws(place))
        self.broken, self.seen = Counter[str](), Counter[str]()

    def recipes(self) -> list[Recipe]:
        return [Recipe(*numbers[:4]) for numbers in self.slot["recipes"].tolist()]

    def rows(self, decoder: Any, start: int = 0, stop: int | None = None) -> torch.Tensor:
        decode = DeviceDecoder(self.transform, decoder, self.broken, self.seen)
        return decode(self.slot, start, len(self.files) if stop is None else stop).cpu()

    def exact(self) -> torch.Tensor:
        """The pixels of data.decode=exact."""
        out = np.empty((len(self.files), 3, self.transform.side, self.transform.side), np.uint8)
        for place, data in enumerate(self.files):
            self.transform(data, Draws(place), out[place])
        return torch.from_numpy(out)


def distance(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Mean difference of each picture, in 1/255."""
    return (a.float() - b.float()).abs().mean((1, 2, 3)).tolist()


def photographs(count: int, side: int = 160) -> list[bytes]:
    """Made up, with the spectrum of photographs."""
    return [photograph(side, seed) for seed in range(count)]


def portraits(count: int, side: int, **options: Any) -> list[bytes]:
    """Stretches of the photograph that comes with matplotlib: its colours are as smooth as those of a camera's pictures are."""
    with Image.open(Path(mpl.get_data_path()) / "sample_data/grace_hopper.jpg") as image:
        whole = image.convert("RGB")
    found = []
    for i in range(count):
        out = io.BytesIO()
        cut = whole.crop((0, 4 * i, 512, 4 * i + 512)).resize((side, side), Image.Resampling.LANCZOS)
        cut.save(out, "JPEG", **{"quality": 92, **options})
        found.append(out.getvalue())
    return found


# -- pixels ------------------------------------------------------------------------------------------------------------


def test_pixels_are_near_the_exact_ones_and_the_same_again_alone_and_together(device: torch.device) -> None:
    kinds = [
        {},
        {"progressive": True},
        {"subsampling": 0},
        {"subsampling": 2},
        {"optimize": True},
        {"restart_marker_blocks": 4},
        {"quality": 50},
    ]
    files = [data for options in kinds for data in portraits(3, 256, **options)]
    kept, decoder = Kept(files, replace(CROPPED, side=96)), jpeg_decoder(device)
    found = kept.rows(decoder)
    far = distance(found, kept.exact())
    print(f"{device}: mean difference from exact {np.mean(far):.3f}/255, most {max(far):.3f}/255")
    assert max(far) < (0.35 if device.type == "cpu" else 1.0), far
    assert not kept.seen and not kept.broken
    for _ in range(3):
        assert torch.equal(kept.rows(decoder), found), "the same bytes and crops, other pixels"
    alone = torch.cat([kept.rows(decoder, i, i + 1) for i in range(len(files))])
    assert torch.equal(alone, found), "a picture's pixels depend on what it is decoded with"


@pytest.mark.parametrize(("side", "most"), [(256, 1.0), (512, 0.3)])
def test_a_decoder_that_doubles_chroma_without_interpolation_is_near_enough(side: int, most: float) -> None:
    """As GPUs' decoders do, and libjpeg when told so: what that alone changes, at half the chroma resolution and 224 pixels out."""
    for data in portraits(3, side, subsampling=2):
        fine, simple = (simplejpeg.decode_jpeg(data, fastupsample=fast) for fast in (False, True))
        far = np.abs(resize(fine, 224, 224).astype(int) - resize(simple, 224, 224)).mean()
        print(f"{side} pixels: {far:.2f}/255")
        assert 0.05 < far < most


@pytest.mark.parametrize("crops", [SQUARE, CROPPED], ids=["whole", "cropped"])
def test_every_orientation_and_a_flip_of_each(device: torch.device, crops: TrainTransform) -> None:
    plain = jpeg(picture(5, (56, 40), "PNG"), quality=98, subsampling=0)
    files = [turned(plain, orientation) for orientation in range(1, 9) for _ in range(6)]
    kept = Kept(files, replace(crops, flip=0.5))
    far = distance(kept.rows(jpeg_decoder(device)), kept.exact())
    assert max(far) < 1.2, [f"{1 + i // 6}: {value:.2f}" for i, value in enumerate(far)]
    flips = kept.slot["recipes"][:, -2]
    assert 10 < flips.sum() < 38, "both kinds are among them"


@bounded(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_box_is_found_again_in_the_stored_picture(
    orientation: int, width: int, height: int, data: st.DataObject
) -> None:
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = left, top, data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height))
    size = (height, width) if orientation >= 5 else (width, height)
    stored = torch.arange(width * height).reshape(1, 1, size[1], size[0])
    left, top, right, bottom = stored_box(box, orientation, width, height)
    whole = on.upright(stored, orientation)
    assert torch.equal(
        whole[..., box[1] : box[3], box[0] : box[2]], on.upright(stored[..., top:bottom, left:right], orientation)
    ), (
        box,
        (left, top, right, bottom),
    )


def test_crops_at_the_borders_and_pictures_smaller_than_the_model(device: torch.device) -> None:
    sizes = [(1, 1), (1, 90), (90, 1), (7, 5), (SIDE, SIDE), (16, 300), (300, 16), (241, 239)]
    files = [jpeg(picture(i, size, "PNG"), quality=98, subsampling=0) for i, size in enumerate(sizes)]
    kept = Kept(files, SQUARE)
    corners = []
    for place, (width, height) in enumerate(sizes):  # the four corners, one after the other
        w, h = max(1, width // 2), max(1, height // 2)
        left, top = (0, width - w)[place % 2], (0, height - h)[place // 2 % 2]
        corners.append(Crop(left, top, left + w, top + h, 1, False, 0))
        kept.slot["recipes"][place, 4:] = corners[-1]
    expected = np.empty((len(files), 3, SIDE, SIDE), np.uint8)
    for data, crop, row in zip(files, corners, expected):
        SQUARE.render(SQUARE.cut(Picture(data, 10**7), crop), crop, row)
    far = distance(kept.rows(jpeg_decoder(device)), torch.from_numpy(expected))
    assert max(far) < 1.2, list(zip(sizes, far))


def test_grey_pictures_have_three_channels(device: torch.device) -> None:
    files = [picture(i, (50, 40), "JPEG", "L", quality=98) for i in range(4)]
    kept = Kept(files, CROPPED)
    assert all(recipe.orientation for recipe in kept.recipes())
    found = kept.rows(jpeg_decoder(device))
    assert torch.equal(found[:, 0], found[:, 1]) and torch.equal(found[:, 0], found[:, 2])
    assert max(distance(found, kept.exact())) < 1.2


def test_colours_are_changed_by_the_same_draws(device: torch.device) -> None:
    colour = Colour((0.4, 0.4, 0.4, 0.1), 0.8, 0.3)
    files = [jpeg(data, subsampling=0) for data in photographs(12, 64)]
    kept = Kept(files, replace(SQUARE, colour=colour, flip=0.5))
    found, plain = kept.rows(jpeg_decoder(device)), Kept(files, SQUARE).exact()
    far = distance(found, kept.exact())
    assert max(far) < 1.6, far
    assert sum(value > 4 for value in distance(found, plain)) > 6, "most of them are changed"
    assert torch.equal(found, kept.rows(jpeg_decoder(device)))


def test_a_chunk_is_decoded_in_bounded_parts(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(photographs(10, 64), CROPPED)
    calls: list[int] = []

    class Noting(Torchvision):
        def __call__(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
            calls.append(len(files))
            return super().__call__(files)

    whole = kept.rows(Noting(cpu))
    monkeypatch.setattr(on, "MOST_BYTES", 3 * (3 * 64 * 64 + 24 * SIDE * SIDE))
    assert torch.equal(kept.rows(Noting(cpu)), whole)
    monkeypatch.setattr(on, "MOST_BYTES", 1)
    assert torch.equal(kept.rows(Noting(cpu)), whole)
    assert calls == [10, 3, 3, 3, 1, *[1] * 10], calls


# -- what the device does not decode -----------------------------------------------------------------------------------


def coded_as_rgb(mark: bool) -> bytes:
    """A JPEG whose components are red, green and blue, said by Adobe's marker or by their names alone."""
    data = jpeg(picture(7, (40, 30), "PNG"), quality=98, keep_rgb=True)
    if mark:
        return data
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


OTHERS = {
    "png": picture(1, (40, 30), "PNG"),
    "webp": picture(1, (40, 30), "WEBP"),
    "cmyk": picture(1, (40, 30), "JPEG", "CMYK"),
    "rgb, marked": coded_as_rgb(True),
    "appended": jpeg(picture(3, (40, 30), "PNG")) + bytes(100),
    "scaled too far": picture(1, (17 * SIDE, 17 * SIDE), "JPEG"),
}


def test_what_the_device_cannot_decode_is_decoded_before(device: torch.device) -> None:
    good = [jpeg(picture(i, (60, 50), "PNG"), quality=98, subsampling=0) for i in range(4)]
    files = [data for pair in zip(OTHERS.values(), good * 2) for data in pair]
    kept = Kept(files, SQUARE)
    assert [recipe.orientation for recipe in kept.recipes()] == [0, 1] * len(OTHERS), list(OTHERS)
    assert all(recipe.size == 0 for recipe in kept.recipes()[::2]), "as pixels: nothing is decoded twice on the CPU"
    found, exact = kept.rows(jpeg_decoder(device)), kept.exact()
    assert torch.equal(found[::2], exact[::2])
    assert max(distance(found, exact)) < 1.2
    assert torch.equal(kept.rows(jpeg_decoder(device), 0, 1), exact[:1]), "a chunk without a JPEG"


def test_colour_spaces_are_told_by_marker_and_by_name() -> None:
    for data, usable in ((coded_as_rgb(True), False), (coded_as_rgb(False), False), (picture(1, (9, 9), "JPEG"), True)):
        image = Picture(data, 10**6)
        crop = SQUARE.crop(image, Draws(0))
        assert image.fits_device(crop, SIDE) == usable


class Refusing(Torchvision):
    """A decoder that refuses some files, and with them all of a call."""

    def __init__(self, device: torch.device, refused: list[bytes]) -> None:
        super().__init__(device)
        self.refused = [hash(data) for data in refused]
        self.calls = 0

    def __call__(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        if any(hash(file.numpy().tobytes()) in self.refused for file in files):
            raise RuntimeError("Failed to decode jpeg stream: 6")
        return super().__call__(files)


@pytest.mark.parametrize("bad", [[3], [0, 15], [4, 5, 6], list(range(16))])
def test_a_refused_picture_is_decoded_by_the_cpu_alone_and_counted_once(cpu: torch.device, bad: list[int]) -> None:
    files = [turned(data, 1 + i % 8) for i, data in enumerate(photographs(16, 48))]
    kept, decoder = Kept(files, CROPPED), Refusing(cpu, [files[i] for i in bad])
    first, before = kept.rows(decoder), decoder.calls
    exact = kept.exact()
    assert torch.equal(first[bad], exact[bad])
    assert max(distance(first, exact)) < 1.5
    assert kept.seen == {on.REFUSED: len(bad)} and not kept.broken
    assert torch.equal(kept.rows(decoder), first) and kept.seen[on.REFUSED] == len(bad), "the second pass"
    assert decoder.calls - before == (len(bad) < 16), "what was refused is not tried again"


def damaged(data: bytes) -> bytes:
    """A JPEG with its header and its end, whose tables for decoding are void."""
    start = data.index(b"\xff\xc4")
    return data[: start + 5] + bytes([255]) * 16 + data[start + 21 :]


def test_a_picture_that_nothing_can_decode_is_grey_and_counted_once(device: torch.device) -> None:
    files = photographs(5, 48)
    files[2] = damaged(files[2])
    kept, decoder = Kept(files, SQUARE), jpeg_decoder(device)
    for _ in range(3):
        found = kept.rows(decoder)
        assert (found[2] == GREY).all() and not (found[1] == GREY).all()
        assert kept.broken == {on.GREY_IMAGE: 1} and kept.seen == {on.REFUSED: 1}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@bounded(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8), st.booleans())
def test_damaged_pictures_are_refused_grey_or_pixels_and_harm_no_other(
    hits: list[tuple[float, int]], progressive: bool
) -> None:
    good = jpeg(picture(1, (40, 30), "PNG"))
    data = bytearray(jpeg(photograph(48, 1), progressive=progressive))
    for where, value in hits:
        data[int(where * (len(data) - 3))] = value
    try:
        kept = Kept([good, bytes(data), good], replace(SQUARE, max_pixels=100_000))
    except BrokenSampleError as error:
        assert error.reason in ("unreadable_image", "huge_image")
        return
    found = kept.rows(Torchvision(torch.device("cpu")))
    assert torch.equal(found[[0, 2]], Kept([good] * 2, SQUARE).rows(Torchvision(torch.device("cpu"))))
    assert kept.broken.total() == int((found[1] == GREY).all()) <= kept.seen.total() <= 1
    assert torch.equal(kept.rows(Torchvision(torch.device("cpu"))), found)


def test_a_picture_that_comes_out_in_another_size_is_not_believed(cpu: torch.device) -> None:
    class Wrong(Torchvision):
        def __call__(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
            found = super().__call__(files)
            return [found[0][:, 1:], found[1][:1], *found[2:]]

    kept = Kept(photographs(4, 48), SQUARE)
    found = kept.rows(Wrong(cpu))
    assert torch.equal(found[:2], kept.exact()[:2]) and kept.seen == {on.REFUSED: 2}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_is_not_the_pictures_fault(cpu: torch.device, error: type[Exception]) -> None:
    class Failing(Torchvision):
        def __call__(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
            raise error("no more")

    with pytest.raises(error):
        Kept(photographs(2, 48), SQUARE).rows(Failing(cpu))


# -- room --------------------------------------------------------------------------------------------------------------

ROW = 3 * SIDE**2


@bounded(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.floats(1, 2))
def test_large_pictures_stay_encoded_while_there_is_room_for_the_pixels_of_all_others(
    kinds: list[int], factor: float
) -> None:
    """A pool that holds the pixels of all is never too small, and is not left unused."""
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
    layout = Layout(2, 100, (3, SIDE, SIDE), 8, tier="device")
    gib = 2**30
    small, said = fitted(layout, 500.0, gib)
    assert small.pool == 100 * ROW and "data.decode=gpu, 2 x 100 samples need 144.2 KiB" in said, said
    large, said = fitted(layout, 3.0 * ROW, gib)
    assert large.pool == 100 * int(HEADROOM * 3 * ROW)
    assert f"need {large.memory_bytes(3.0 * ROW) / 2**20:.1f} MiB" in said, said
    tight, _ = fitted(layout, 3.0 * ROW, int(1.5 * 2 * 100 * ROW))
    assert 100 * ROW < tight.pool < large.pool, "less room than the pictures would take: some wait as pixels"
    with pytest.raises(UserError, match=r"data\.decode=gpu: 2 x 100 samples need .*take offload=encoded, data"):
        fitted(layout, 3.0 * ROW, 2 * 100 * ROW)


@pytest.mark.parametrize("offload", ["none", "host", "encoded"])
def test_the_plan_counts_the_memory_that_a_run_states(
    cpu: torch.device, mixed: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    tier = "encoded" if offload == "encoded" else "host"
    monkeypatch.setattr("clipscale.data.stream.picture_bytes", lambda *_: 2500.0)
    with open_stream(mixed, batch=64, side=SIDE, decode="gpu", device=cpu, workers=1, tier=tier) as stream:
        said = stream.memory
    data = DataConfig(decode="gpu", workers=1)
    config = PlanConfig(batch=64, data=data, offload=offload, gpus=1, picture=2500)
    rehearsal: Any = SimpleNamespace(row=(3, SIDE, SIDE), row_type=torch.uint8, context_length=8)
    planned = memory.host(config, rehearsal, 64, 32, cuda=False).process["batch"]
    assert f"need {format_bytes(planned)} of" in said, said


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
    for offload in ("none", "host", "encoded"):
        check(replace(config, offload=offload))
    with pytest.raises(UserError, match=r"offload=disk .*with data\.decode=gpu take offload=encoded, or offload=host"):
        check(replace(config, offload="disk"))


# -- decoded as they arrive --------------------------------------------------------------------------------------------


class Gated:
    """Stands for the decoder of rows: pixels are the rows' own numbers; each call waits until it is let through, and is noted."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.gate, self.error = threading.Semaphore(0), ""

    def __call__(self, slot: Slot, start: int, stop: int) -> torch.Tensor:
        assert self.gate.acquire(timeout=20), "never let through"
        self.calls.append((slot.number, start, stop))
        if self.error:
            raise RuntimeError(self.error)
        return torch.arange(start, stop, dtype=torch.uint8)[:, None] + 100 * slot.number

    def let(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[on.DecodedAhead, Gated]]:
    monkeypatch.setattr(on, "AHEAD", 4)
    decode = Gated()
    thread = on.DecodedAhead(decode, np.zeros((2, 20, 1), np.uint8))  # type: ignore[arg-type]
    yield thread, decode
    decode.let(50)
    thread.close()


def test_pieces_are_decoded_in_their_order_and_once(ahead: tuple[on.DecodedAhead, Gated]) -> None:
    thread, decode = ahead
    slots = Slot(0, {}), Slot(1, {})
    decode.let(100)
    for step in range(4):
        decode.calls.clear()
        thread.arrived(step, slots[step % 2], 6, 18)
        thread.arrived(step + 1, slots[(step + 1) % 2], 3, 18)
        assert thread.rows(step, 0, 3)[:, 0].tolist() == [100 * (step % 2) + i for i in range(3)]
        assert thread.rows(step, 3, 6)[:, 0].tolist() == [100 * (step % 2) + i for i in range(3, 6)], "in mid-piece"
        thread.arrived(step, slots[step % 2], 18, 18)
        for start, stop in ((6, 18), (0, 18), (17, 18)):
            assert thread.rows(step, start, stop)[:, 0].tolist() == [100 * (step % 2) + i for i in range(start, stop)]
        spans = [(0, 4), (4, 6), (6, 10), (10, 14), (14, 18)]
        assert decode.calls == [(step % 2, *span) for span in spans], decode.calls
        thread.forget(step)


def test_the_next_batch_is_decoded_while_this_one_is_used(ahead: tuple[on.DecodedAhead, Gated]) -> None:
    thread, decode = ahead
    decode.let(2)
    thread.arrived(0, Slot(0, {}), 4, 4)
    thread.arrived(1, Slot(1, {}), 8, 20)
    assert thread.rows(0, 0, 4)[:, 0].tolist() == [0, 1, 2, 3]
    deadline = time.monotonic() + 20
    while len(decode.calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert decode.calls == [(0, 0, 4), (1, 0, 4)], "nobody has asked for the second"


def test_a_slot_is_not_given_away_before_it_has_been_read(ahead: tuple[on.DecodedAhead, Gated]) -> None:
    thread, decode = ahead
    thread.arrived(0, Slot(0, {}), 8, 8)
    free = threading.Thread(target=thread.forget, args=(0,))
    free.start()
    free.join(0.2)
    assert free.is_alive(), "the thread is still reading the pictures"
    decode.let(2)
    free.join(20)
    assert not free.is_alive() and len(decode.calls) == 2
    thread.forget(7)  # nothing of it was begun


def test_what_goes_wrong_on_the_device_is_raised_where_rows_are_asked_for(ahead: tuple[on.DecodedAhead, Gated]) -> None:
    thread, decode = ahead
    decode.let(10)
    decode.error = "CUDA is gone"
    thread.arrived(0, Slot(0, {}), 4, 8)
    with pytest.raises(RuntimeError, match="CUDA is gone"):
        thread.rows(0, 0, 2)
    with pytest.raises(RuntimeError, match="CUDA is gone"):
        thread.forget(0)


# -- whole streams and runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs and PNGs in turns, and among them some that are cut off, and one that only its decoding shows to be broken."""
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
@pytest.mark.parametrize("tier", ["host", "encoded"])
def test_a_stream_gives_the_same_samples_with_nearly_the_same_pixels(
    device: torch.device, mixed: Path, tier: str, workers: int
) -> None:
    options: dict[str, Any] = {"batch": 32, "side": SIDE, "augment": AugmentConfig(scale=(0.3, 1.0), flip=0.5)}
    with open_stream(mixed, **options) as host:
        expected = [(b.ids().clone(), b.tokens(0, 32).clone(), b.pixels(0, 32).clone()) for b in batches(host, 6)]
    with open_stream(mixed, **options, decode="gpu", device=device, tier=tier, workers=workers) as stream:
        assert "data.decode=gpu" in stream.memory
        for batch, (ids, tokens, pixels) in zip(batches(stream, 6), expected):
            first = torch.cat([batch.pixels(i, i + 8) for i in range(0, 32, 8)])
            again = torch.cat([batch.pixels(i, i + 8) for i in range(0, 32, 8)])
            assert first.device.type == ("cpu" if tier == "host" else device.type) and not batch.passing
            assert torch.equal(first, again), "the passes saw other pixels"
            assert torch.equal(batch.ids()[:5], ids[:5]) and torch.equal(batch.tokens(0, 5), tokens[:5])
            if torch.equal(batch.ids(), ids):  # before the one whose place was given away
                assert max(distance(first.cpu(), pixels)) < 1.5
        assert stream.broken[on.GREY_IMAGE] == stream.seen[on.REFUSED] == 2, "once in each epoch"
        assert stream.broken["unreadable_image"] >= 10, "those that are cut off are passed over"


def batches(stream: Any, count: int) -> Any:
    return (stream.next_batch() for _ in range(count))


@pytest.mark.parametrize("tier", ["host", "encoded"])
def test_a_growing_batch_and_a_resumed_stream_have_the_same_pixels(cpu: torch.device, mixed: Path, tier: str) -> None:
    sizes = (16, 16, 32, 48, 64)
    options: dict[str, Any] = {"batch": 64, "side": SIDE, "lanes": 16, "decode": "gpu", "device": cpu, "tier": tier}

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

    for workers, tier in ((0, "encoded"), (0, "host"), (2, "host")):
        for number in range(4):
            options = {"decode": "gpu", "device": cpu, "workers": workers, "tier": tier}
            with open_stream(mixed, batch=16, side=SIDE, **options) as stream:
                stream.next_batch().pixels(0, 8)
            if not number:
                before = opened()
        assert opened() == before, f"{workers} workers: files and threads {before} -> {opened()}"


def test_the_memory_of_a_run_is_stated_with_its_pixels(cpu: torch.device, mixed: Path) -> None:
    options = {"batch": 64, "side": SIDE, "decode": "gpu", "device": cpu, "workers": 1}
    stated = {}
    for tier in ("host", "encoded"):
        with open_stream(mixed, **options, tier=tier) as stream:
            stream.next_batch().pixels(0, 64)
            stated[tier] = stream._arena.layout.memory_bytes(1000.0)
    assert stated["host"] - stated["encoded"] == pytest.approx(2 * 64 * ROW, abs=4096), "two batches of pixels besides"


def test_loaders_have_no_use_for_the_devices_decoder() -> None:
    code = (
        "import sys, clipscale.data.workers; print(sorted({'torchvision', 'clipscale.data.device'} & set(sys.modules)))"
    )
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
    [("encoded", 0, 2), ("host", 0, 1), pytest.param("none", 2, 1, marks=pytest.mark.slow)],
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


def test_kept_graphs_and_passes_of_other_chunks_see_the_same_pixels(
    cpu: torch.device, demo: Path, tmp_path: Path
) -> None:
    losses = []
    for name, cache in (("a", CacheConfig(image_chunk=24, text_chunk=32, keep="2M")), ("b", CacheConfig(chunk="64"))):
        train(augmented(demo, tmp_path / name, "gpu", offload="encoded", cache=cache, samples=192))
        losses.append(curve(tmp_path / name))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), losses
