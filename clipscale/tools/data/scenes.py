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
COLOURS: dict[str, list[int]] = TABLES["colours"]
SHAPES: list[str] = TABLES["shapes"]
TEMPLATES: list[str] = TABLES["templates"]
OPPOSITES: dict[str, str] = TABLES["opposites"]
CLASSES = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
UNSEEN = tuple((colour, SHAPES[(5 * i + 2) % len(SHAPES)]) for i, colour in enumerate(COLOURS))
"""Combinations that no training scene shows: each colour once, each shape once or twice, in others often."""
SEEN = tuple(pair for pair in CLASSES if pair not in UNSEEN)


@dataclass(frozen=True)
class Thing:
    """One object: its class, centre (x, y), half its width, and rotation in degrees."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True)
class Scene:
    """`kind`: `one`, `count` (several alike), `pair` (the first `relation` the second) or `row` (from the left)."""

    kind: str
    things: Sequence[Thing]
    relation: str
    shade: float

    def content(self) -> tuple[str, ...]:
        """The scene as far as captions describe it: equal for two scenes that one caption fits."""
        names = [f"{thing.colour} {thing.shape}" for thing in self.things]
        # `b between a and c` fits both directions of a row.
        return min((self.relation, *names), (OPPOSITES.get(self.relation, self.relation), *reversed(names)))


def single(rng: Random, pair: tuple[str, str]) -> Scene:
    """One object of the class `pair` near the middle, at least large enough to recognise its outline."""
    radius = rng.uniform(0.22, 0.4)
    x, y = (0.5 + rng.uniform(-0.09, 0.09) for _ in range(2))
    return Scene("one", [Thing(*pair, x, y, radius, rng.uniform(-12, 12))], "", rng.random())


def compose(rng: Random, kind: str) -> Scene:
    if kind == "one":
        return single(rng, rng.choice(SEEN))
    shade = rng.random()
    if kind == "count":
        number = rng.choice((2, 2, 3, 3, 4))
        pairs = [rng.choice(SEEN)] * number
        spots = sorted(rng.sample(TABLES["grid"], number))
        relation = TABLES["numbers"][number]
    elif kind == "row":
        pairs = rng.sample(SEEN, 3)
        y = rng.uniform(0.3, 0.7)
        spots = [(x, y) for x in (0.19, 0.5, 0.81)]
        relation = "in a row"
    else:
        pairs = rng.sample(SEEN, 2)
        relation = rng.choice(tuple(OPPOSITES))
        across = rng.uniform(0.3, 0.7)
        spots = [(0.26, across), (0.74, across)] if "of" in relation else [(across, 0.26), (across, 0.74)]
        if relation in ("right of", "below"):
            spots.reverse()
    return Scene(kind, [_near(rng, *place, *TABLES["radii"][kind]) for place in zip(pairs, spots)], relation, shade)


def _near(rng: Random, pair: tuple[str, str], spot: tuple[float, float], low: float, high: float) -> Thing:
    x, y = (v + rng.uniform(-0.04, 0.04) for v in spot)
    return Thing(*pair, x, y, rng.uniform(low, high), rng.uniform(-12, 12))


def caption(scene: Scene, rng: Random) -> str:
    """One English caption for the scene, with random words and constructions."""
    thing = scene.things[0]
    if scene.kind == "one":
        text = _caption_one(thing, rng)
    elif scene.kind == "count":
        shape = _word(rng, thing.shape)
        text = f"{scene.relation} {_word(rng, thing.colour)} {TABLES['plurals'].get(shape, shape + 's')}"
    else:
        things = scene.things
        relation = scene.relation
        if scene.kind == "pair" and rng.random() < 0.5:
            things = things[::-1]
            relation = OPPOSITES[relation]
        phrases = [_phrase(rng, thing) for thing in things]
        text = rng.choice(TABLES["together"][relation]).format(*phrases)
    frame = rng.choice(TABLES["frames"])
    if scene.kind == "count":
        frame = frame.replace("there is", "there are")
    text = frame.format(text)
    if rng.random() < 0.15:
        shade = "grey"
        if scene.shade < 0.4:
            shade = "dark"
        elif scene.shade > 0.6:
            shade = "light"
        text += f" on a {shade} background"
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.4 else "")


def _word(rng: Random, word: str) -> str:
    others = TABLES["other_words"].get(word)
    return rng.choice(others) if others and rng.random() < 0.15 else word


def _size(thing: Thing) -> str:
    if thing.radius < 0.18:
        return "small"
    return "large" if thing.radius > 0.29 else ""


def _phrase(rng: Random, thing: Thing, size: bool = False) -> str:
    """`a small red circle`, `one scarlet disc`, `the red circle` ..."""
    words = [_word(rng, _size(thing))] if size and _size(thing) and rng.random() < 0.6 else []
    words += [_word(rng, thing.colour), _word(rng, thing.shape)]
    article = rng.choice(TABLES["articles"])
    if article == "a" and words[0][0] in "aeiou":
        article = "an"
    return " ".join([article, *words])


def _caption_one(thing: Thing, rng: Random) -> str:
    form = rng.random()
    if form < 0.12:
        words = [rng.choice(words) for words in TABLES["painted"]]
        return " ".join([words[0], _word(rng, thing.shape), words[1], _word(rng, thing.colour)])
    text = _phrase(rng, thing, size=True)
    if form > 0.75:
        text += " " + _place(thing)
    elif form > 0.68:
        text += rng.choice((" alone", " and nothing else"))
    return text


def _place(thing: Thing) -> str:
    dx, dy = thing.x - 0.5, thing.y - 0.5
    if max(abs(dx), abs(dy)) < 0.04:
        return "in the middle"
    if abs(dx) > abs(dy):
        return "on the left" if dx < 0 else "on the right"
    return "at the top" if dy < 0 else "at the bottom"


def _around(number: int, *radii: float) -> list[tuple[float, float]]:
    """Corners at equal angles around the origin, clockwise from the top. The radii repeat."""
    corners = [(radii[i % len(radii)], 2 * math.pi * i / number) for i in range(number)]
    return [(r * math.sin(a), -r * math.cos(a)) for r, a in corners]


_OUTLINES = TABLES["corners"] | {"circle": _around(24, 1.0), "ring": _around(24, 1.0), "star": _around(10, 1.1, 0.42)}
"""Corners of each shape of radius 1 around the origin, before rotation."""


def _mask(thing: Thing, side: int) -> np.ndarray:
    """Each pixel's coverage by the thing, (side, side, 1) in 0..1, from 4 x 4 samples a pixel."""
    unit = 4 * side
    canvas = Image.new("L", (unit, unit))
    draw = ImageDraw.Draw(canvas)
    turn = cmath.rect(thing.radius * unit, math.radians(thing.angle))
    layers = [(1.0, 255)]
    if thing.shape == "ring":
        layers.append((0.52, 0))
    for scale, fill in layers:
        corners = [unit * complex(thing.x, thing.y) + scale * turn * complex(*xy) for xy in _OUTLINES[thing.shape]]
        draw.polygon([(corner.real, corner.imag) for corner in corners], fill=fill)
    return np.asarray(canvas.reduce(4), dtype=np.float32)[:, :, None] / 255


def render(scene: Scene, rng: Random, side: int) -> Image.Image:
    """An RGB picture of side x side pixels: the scene on a shaded, slightly tinted, noisy background."""
    noise = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))
    base = 30 + 190 * scene.shade + np.array([rng.uniform(-12, 12) for _ in range(3)], dtype=np.float32)
    ramp = np.linspace(-1, 1, side, dtype=np.float32)
    slope = rng.uniform(-18, 18) * ramp[:, None] + rng.uniform(-18, 18) * ramp[None, :]
    picture = np.empty((side, side, 3), dtype=np.float32)
    picture[:] = base + slope[:, :, None]
    for thing in scene.things:
        colour = np.array([c + rng.uniform(-14, 14) for c in COLOURS[thing.colour]], dtype=np.float32)
        coverage = _mask(thing, side)
        picture += coverage * (colour - picture)
    spread = rng.uniform(2, 9)
    picture += noise.integers(-128, 128, picture.shape, dtype=np.int16) * np.float32(spread / 74)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))
