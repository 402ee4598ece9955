"""Colours change as torchvision changes them, and by the random numbers alone."""

import io

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import functional as tv

from clipscale.data.decode import Colour, Picture, TrainTransform
from clipscale.data.order import CounterRNG
from tests.data.files import photograph, picture
from tests.data.test_decode import MOST


def test_colours_change_at_their_rates_and_by_the_random_numbers_alone() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8), np.uint8)
    jitter = Colour((0.4, 0.4, 0.4, 0.1), 0.5, 0.25)
    found = [jitter(pixels, CounterRNG(i)) for i in range(400)]
    grey = sum(bool((x[0] == x[1]).all() and (x[0] == x[2]).all()) for x in found)
    same = sum(np.array_equal(x, pixels) for x in found)
    assert 70 < grey < 130 and 110 < same < 190, (grey, same)
    assert np.array_equal(found[3], jitter(pixels, CounterRNG(3)))


STEPS = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)


@pytest.mark.parametrize("changed", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_colours_are_those_of_torchvision_for_the_same_factors(changed: tuple[int, ...]) -> None:
    """open_clip jitters Pillow pictures: torchvision's operations on these round after each step, and hold a hue in a byte."""
    strengths = tuple(strength if step in changed else 0.0 for step, strength in enumerate((0.6, 0.5, 1.5, 0.5)))
    image = Image.open(io.BytesIO(photograph(64, 1)))
    pixels = np.asarray(image).transpose(2, 0, 1)
    for seed in range(12):
        ours = Colour(strengths, 1.0, 0.0)(pixels, CounterRNG(seed)).astype(int)  # type: ignore[arg-type]
        rng, theirs = CounterRNG(seed), image
        rng.uniform()
        for step in changed:
            low, high = (-0.5, 0.5) if step == 3 else (max(0.0, 1 - strengths[step]), 1 + strengths[step])
            theirs = STEPS[step](theirs, rng.uniform(low, high))
        difference = np.abs(ours - np.asarray(theirs).transpose(2, 0, 1))
        moved = np.abs(ours - pixels).mean()
        print(f"{changed} {seed}: mean {difference.mean():.2f}, at most {difference.max()}, moved {moved:.1f}")
        assert difference.mean() < 1.5 and difference.max() <= (12 if 3 in changed else 2), seed


def test_grey_is_that_of_torchvision() -> None:
    image = Image.open(io.BytesIO(photograph(64, 1)))
    ours = Colour((0.4, 0.4, 0.4, 0.1), 0.0, 1.0)(np.asarray(image).transpose(2, 0, 1), CounterRNG(0))
    theirs = np.asarray(tv.rgb_to_grayscale(image, 3)).transpose(2, 0, 1)
    assert np.abs(ours.astype(int) - theirs).max() <= 1 and np.ptp(ours, axis=0).max() == 0


def test_a_crop_and_the_bytes_give_the_same_colours_again() -> None:
    transform = TrainTransform(16, (0.5, 1.0), (0.75, 4 / 3), 0.5, MOST, True, Colour((0.4, 0.4, 0.4, 0.1), 0.8, 0.2))
    data = picture(2, (64, 48))
    first, again = np.empty((2, 3, 16, 16), np.uint8)
    seen = set()
    for seed in range(10):
        transform(data, CounterRNG(seed), first)
        crop = transform.crop(Picture(data, MOST), CounterRNG(seed))
        transform.render(transform.cut(Picture(data, MOST), crop), crop, again)
        assert np.array_equal(first, again), seed
        seen.add(first.tobytes())
    assert len(seen) == 10
