"""Decoding on the device gives the CPU decoder's pixels, the same in both passes, for every kind of picture.

Here the device is the CPU, and a CUDA device if there is one. Only the decoder and the kernels differ.
"""

from dataclasses import replace

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import example, given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from clipscale.bench.data_work import photograph
from clipscale.data.decode import Colour, Crop, Picture, TrainTransform, resize, stored_box
from clipscale.data.loader import gpu_decode as on
from clipscale.data.loader.gpu_decode import Torchvision, jpeg_decoder
from clipscale.data.loader.offload import GREY
from clipscale.data.sample import BrokenSampleError
from clipscale.data.shards.access import EVENT
from tests.data.files import picture
from tests.data.loader.ondevice import (
    CROPPED,
    SIDE,
    SQUARE,
    Kept,
    damaged,
    distance,
    jpeg,
    photographs,
    portraits,
    turned,
)

pytestmark = pytest.mark.timeout(60)
REFUSED = EVENT + on.REFUSED


# -- pixels ------------------------------------------------------------------------------------------------------------


def test_pixels_are_near_the_exact_ones_and_the_same_again_alone_and_together(device: torch.device) -> None:
    kinds = [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2}, {"optimize": True}, {"quality": 50}]
    kinds += [{"restart_marker_blocks": 4}]
    files = [data for options in kinds for data in portraits(3, 256, **options)]
    kept, decoder = Kept(files, replace(CROPPED, side=96)), jpeg_decoder(device)
    found = kept.rows(decoder)
    far = distance(found, kept.exact())
    print(f"{device}: mean difference from exact {np.mean(far):.3f}/255, most {max(far):.3f}/255")
    assert max(far) < (0.35 if device.type == "cpu" else 1.0), far
    assert not kept.counts
    for _ in range(3):
        assert torch.equal(kept.rows(decoder), found), "the same bytes and crops, other pixels"
    alone = torch.cat([kept.rows(decoder, i, i + 1) for i in range(len(files))])
    assert torch.equal(alone, found), "a picture's pixels depend on what it is decoded with"


@pytest.mark.parametrize(("side", "most"), [(256, 1.0), (512, 0.3)])
def test_a_decoder_that_doubles_chroma_without_interpolation_is_near_enough(side: int, most: float) -> None:
    """GPU decoders do so, and libjpeg on request. Measured at half the chroma resolution, resized to 224 pixels."""
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


@bounded(max_examples=200)
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
    kept = Kept([picture(i, (50, 40), "JPEG", "L", quality=98) for i in range(4)], CROPPED)
    found = kept.rows(jpeg_decoder(device))
    assert all(recipe.orientation for recipe in kept.recipes()) and max(distance(found, kept.exact())) < 1.2
    assert torch.equal(found[:, 0], found[:, 1]) and torch.equal(found[:, 0], found[:, 2])


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
    """A JPEG whose components are red, green and blue, by Adobe's marker or by their names alone."""
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
    "rgb, by name": coded_as_rgb(False),
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
    assert kept.counts == {REFUSED: len(bad)}
    assert torch.equal(kept.rows(decoder), first) and kept.counts[REFUSED] == len(bad), "the second pass"
    assert decoder.calls - before == (len(bad) < 16), "what was refused is not tried again"


def test_a_picture_that_nothing_can_decode_is_grey_and_counted_once(device: torch.device) -> None:
    files = photographs(5, 48)
    files[2] = damaged(files[2])
    kept, decoder = Kept(files, SQUARE), jpeg_decoder(device)
    for _ in range(3):
        found = kept.rows(decoder)
        assert (found[2] == GREY).all() and not (found[1] == GREY).all()
        assert kept.counts == {on.GREY_IMAGE: 1, REFUSED: 1}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@bounded(max_examples=150)
@example([(0.072265625, 178)], False)
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
    assert kept.counts[on.GREY_IMAGE] <= kept.counts[REFUSED] <= 1
    assert (
        not kept.counts[on.GREY_IMAGE] or (found[1] == GREY).all()
    )  # damage may also make a grey picture that can be decoded
    assert torch.equal(kept.rows(Torchvision(torch.device("cpu"))), found)


def test_a_picture_that_comes_out_in_another_size_is_not_believed(cpu: torch.device) -> None:
    class Wrong(Torchvision):
        def __call__(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
            found = super().__call__(files)
            return [found[0][:, 1:], found[1][:1], *found[2:]]

    kept = Kept(photographs(4, 48), SQUARE)
    found = kept.rows(Wrong(cpu))
    assert torch.equal(found[:2], kept.exact()[:2]) and kept.counts == {REFUSED: 2}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no more"),
        torch.AcceleratorError("no more"),
        RuntimeError("Error while decoding JPEG images: CUDA out of memory. Tried to allocate 2.00 MiB."),
    ],
    ids=["memory", "device", "memory, as torchvision says it"],
)
def test_a_device_that_fails_is_not_the_pictures_fault(cpu: torch.device, error: Exception) -> None:
    class Failing(Torchvision):
        def __call__(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
            raise error

    kept = Kept(photographs(2, 48), SQUARE)
    expected = torch.OutOfMemoryError if "out of memory" in str(error) else type(error)
    with pytest.raises(expected, match=r"no more|out of memory"):
        kept.rows(Failing(cpu))
    assert not kept.counts
