"""The demo set: about 20k captioned pictures in LAION's shard layout, and held-out test sets in CLIP_benchmark's.

Every picture is a pure function of (split, index), so the bytes do not depend on the number of processes that
write them.
"""

import io
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from clipscale.common.errors import UserError
from clipscale.common.files import user_cache
from clipscale.common.hardware import cores
from clipscale.common.terminal import say
from clipscale.tools.data import scenes
from clipscale.tools.data.settings import DemoSettings

Sample = dict[str, str | bytes]
"""A sample as webdataset's writer takes it: `__key__`, and bytes by extension."""

RECIPE_VERSION = 2
"""Goes up with every change of pictures, captions or layout."""
SEED = 0
SIDE = 30
"""Side of a picture in pixels."""
TRAIN_SHARDS = 16
KINDS = ("one", "count", "pair", "row")
TRAIN_MIX = (0.6, 0.1, 0.2, 0.1)
RETRIEVAL_MIX = (0.0, 0.2, 0.6, 0.2)
OBJECTS_PER_CLASS = 20
UNSEEN_PER_CLASS = 60
RETRIEVAL_IMAGES = 500
CAPTIONS_PER_IMAGE = 5
TEST_SETS = ("objects", "unseen", "retrieval")


@dataclass(frozen=True)
class DemoPaths:
    """Paths of a demo set: `train` is a shard list for `data.train`, `tests` are folders for `eval.sets`."""

    root: Path
    train: str
    tests: dict[str, Path]


def paths(root: Path | None = None) -> DemoPaths:
    """The paths of the demo set at `root` (None: in the user's cache), which need not exist yet."""
    root = root or user_cache() / "demo"
    train = f"{root}/train/{{00000..{TRAIN_SHARDS - 1:05d}}}.tar"
    return DemoPaths(root, train, {name: root / name for name in TEST_SETS})


def main(settings: DemoSettings) -> Path:
    """Render the set unless it is there, and print where it is. Returns its folder."""
    place = paths(Path(settings.root).expanduser() if settings.root else None)
    begun = time.monotonic()
    fresh = render_demo(place.root, settings.samples)
    verb = f"written in {time.monotonic() - begun:.1f} s" if fresh else "already there"
    sets = ", ".join(map(str, place.tests.values()))
    say(f"demo set {verb}: {settings.samples} pairs in {place.train}; evaluation sets {sets}")
    return place.root


def is_missing(sources: Sequence[str]) -> bool:
    """Whether the set in the user's cache is one of the sources, by data=demo, and is not there."""
    place = paths()
    return place.train in sources and not place.root.exists()


def render_missing(sources: Sequence[str]) -> None:
    """Render the set in the user's cache if it `is_missing`."""
    if is_missing(sources):
        say("data=demo: rendering the demo set")
        main(DemoSettings())


def render_demo(root: Path, train_samples: int = 20_000) -> bool:
    """Write the set to `root`, complete or not at all. False if a set of the same recipe is there already.

    Raises UserError if `root` holds something else.
    """
    recipe = f"{json.dumps({'recipe': RECIPE_VERSION, 'train_samples': train_samples})}\n".encode()
    if train_samples < TRAIN_SHARDS:
        raise UserError(f"samples={train_samples}: the demo set needs at least {TRAIN_SHARDS}, one for each shard")
    note = root / "recipe.json"
    if note.is_file() and note.read_bytes() == recipe:
        return False
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"root={root}: exists and is not this demo set; remove it, or choose a new folder")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as temporary:
            new = Path(temporary) / "new"
            _write_all(new, train_samples)
            (new / "recipe.json").write_bytes(recipe)
            new.rename(root)
    except OSError as error:
        if note.is_file() and note.read_bytes() == recipe:  # by another process meanwhile
            return False
        raise UserError(f"root={root}: cannot be written ({error.strerror}); choose another folder") from error
    return True


def _write_all(root: Path, train_samples: int) -> None:
    for name in ("train", *(f"{name}/test" for name in TEST_SETS)):
        (root / name).mkdir(parents=True)
    shards: dict[Path, Callable[[], Iterator[Sample]]] = {
        root / "objects/test/0.tar": partial(_class_samples, "objects", scenes.SEEN, OBJECTS_PER_CLASS),
        root / "unseen/test/0.tar": partial(_class_samples, "unseen", scenes.UNSEEN, UNSEEN_PER_CLASS),
        root / "retrieval/test/0.tar": _retrieval_samples,
    }
    for shard in range(TRAIN_SHARDS):
        start, stop = (train_samples * number // TRAIN_SHARDS for number in (shard, shard + 1))
        shards[root / f"train/{shard:05d}.tar"] = partial(_train_samples, shard, start, stop)
    # the text files that CLIP_benchmark's reader expects beside the shards
    for name in TEST_SETS:
        (root / name / "test" / "nshards.txt").write_text("1\n")
        if name == "retrieval":
            (root / name / "dataset_type.txt").write_text("retrieval\n")
        else:
            (root / name / "classnames.txt").write_text("".join(f"{c} {s}\n" for c, s in scenes.CLASSES))
            (root / name / "zeroshot_classification_templates.txt").write_text("\n".join(scenes.TEMPLATES) + "\n")
    # spawn: the caller may hold threads and locks; the fork server belongs to the loader's workers
    with ProcessPoolExecutor(min(cores(), 8), mp_context=multiprocessing.get_context("spawn")) as pool:
        rendered = pool.map(_rendered, shards.values())
        from clipscale.data.shards.writer import shard_writer  # here: webdataset loads torch, while others render

        for path, samples in zip(shards, rendered):
            with shard_writer(path) as writer:
                for sample in samples:
                    writer.write(sample)


def _rendered(samples: Callable[[], Iterator[Sample]]) -> list[Sample]:
    return list(samples())


def _train_samples(shard: int, start: int, stop: int) -> Iterator[Sample]:
    for index in range(start, stop):
        rng = Random(f"{SEED}/train/{index}")
        scene = scenes.compose(rng, rng.choices(KINDS, TRAIN_MIX)[0])
        words = scenes.caption(scene, rng)
        key = f"{shard:05d}{index - start:04d}"
        # JPEG like web data, at a quality and chroma resolution that leave 30 pixels readable
        picture = _encode(scene, rng, "JPEG", quality=95, subsampling=0)
        record = {"caption": words, "key": key, "status": "success", "width": SIDE, "height": SIDE}
        yield {"__key__": key, "jpg": picture, "txt": words.encode(), "json": json.dumps(record).encode()}


def _class_samples(split: str, classes: tuple[tuple[str, str], ...], number: int) -> Iterator[Sample]:
    for index in range(len(classes) * number):
        rng = Random(f"{SEED}/{split}/{index}")
        pair = classes[index % len(classes)]
        label = str(scenes.CLASSES.index(pair)).encode()
        yield {"__key__": f"{index:06d}", "png": _encode(scenes.single(rng, pair), rng, "PNG"), "cls": label}


def _retrieval_samples() -> Iterator[Sample]:
    """Images whose contents all differ, so that every caption has one right answer."""
    rng = Random(f"{SEED}/retrieval")
    taken: set[tuple[str, ...]] = set()
    while len(taken) < RETRIEVAL_IMAGES:
        scene = scenes.compose(rng, rng.choices(KINDS, RETRIEVAL_MIX)[0])
        if scene.content() in taken:
            continue
        words: dict[str, None] = {}
        while len(words) < CAPTIONS_PER_IMAGE:
            words[scenes.caption(scene, rng)] = None
        key = f"{len(taken):06d}"
        taken.add(scene.content())
        yield {"__key__": key, "png": _encode(scene, rng, "PNG"), "txt": "\n".join(words).encode()}


def _encode(scene: scenes.Scene, rng: Random, kind: str, **options: int) -> bytes:
    out = io.BytesIO()
    scenes.render(scene, rng, SIDE).save(out, kind, **options)
    return out.getvalue()
