"""The demo set's content: random scenes of coloured shapes, their pictures, and English captions for them.

Everything is a pure function of a random.Random. Lengths are in units of the picture's side; y grows downward.
"""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from clipscale.common import files

TABLES = files.read_yaml(Path(__file__).with_name("scenes.yaml"))
TEMPLATES: list[str] = TABLES["templates"]
# Side of a picture in pixels.
SIDE = 30
# The class of an object: colour and shape.
ShapeClass = tuple[str, str]
CLASSES = tuple((colour, shape) for colour in TABLES["colours"] for shape in TABLES["shapes"])
# Combinations that no training scene shows.
UNSEEN = tuple(TABLES["unseen"].items())
SEEN = tuple(pair for pair in CLASSES if pair not in UNSEEN)


@dataclass(frozen=True)
class Scene:
    """The objects at the spots of a layout. Captions tell any two different scenes apart."""

    layout: str
    objects: Sequence[ShapeClass]


def compose(rng: Random, layout: str) -> Scene:
    """A scene of training: no combination of UNSEEN, and no two objects alike."""
    return Scene(layout, tuple(rng.sample(SEEN, len(TABLES["layouts"][layout]["spots"]))))


def caption(scene: Scene, rng: Random) -> str:
    """One English caption for the scene, with random words and constructions."""
    text = rng.choice(TABLES["layouts"][scene.layout]["captions"])
    text = rng.choice(TABLES["frames"]).format(text).format(*(_phrase(rng, thing) for thing in scene.objects))
    if rng.random() < 0.3:
        text = text.capitalize()
    return text + "." * (rng.random() < 0.4)


def _phrase(rng: Random, shown_class: ShapeClass) -> str:
    """`a red circle`, `one scarlet disc`, `the red circle` ..."""
    words = [TABLES["other_words"].get(word, word) if rng.random() < 0.15 else word for word in shown_class]
    article = rng.choice(TABLES["articles"])
    if article == "a" and words[0][0] in "aeiou":
        article = "an"
    return " ".join([article, *words])


def render(scene: Scene, rng: Random) -> Image.Image:
    """An RGB picture of SIDE x SIDE pixels: the scene on a plain, slightly tinted background, with noise."""
    unit = 4 * SIDE  # drawn larger, then averaged
    layout = TABLES["layouts"][scene.layout]
    canvas = Image.new("RGB", (unit, unit), _near(rng, [rng.randint(30, 220)] * 3))
    draw = ImageDraw.Draw(canvas)
    for (colour, shape), spot in zip(scene.objects, layout["spots"]):
        x, y = (unit * (v + rng.uniform(-0.06, 0.06)) for v in spot)
        radius = unit * rng.uniform(*layout["radii"])
        turn = cmath.rect(radius, math.radians(rng.uniform(-12, 12)))
        fill = _near(rng, TABLES["colours"][colour])
        outline = TABLES["shapes"][shape]
        if isinstance(outline, float):
            draw.circle((x, y), radius, outline=fill, width=math.ceil(outline * radius))
        else:
            corners = complex(x, y) + turn * (np.array(outline) @ [1, 1j])
            draw.polygon(corners.view(float).tolist(), fill=fill)
    noise = np.random.default_rng(rng.getrandbits(64)).integers(-12, 13, (SIDE, SIDE, 3))
    return Image.fromarray((np.asarray(canvas.reduce(4)) + noise).clip(0, 255).astype(np.uint8))


def _near(rng: Random, colour: Sequence[int]) -> tuple[int, ...]:
    return tuple(value + rng.randint(-14, 14) for value in colour)  # Pillow limits them to 0 and 255
