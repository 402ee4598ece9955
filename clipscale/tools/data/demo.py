"""The demo set: about 20k captioned pictures in LAION's shard layout, and held-out test sets in CLIP_benchmark's.

Every picture is a pure function of (split, index), so the bytes do not depend on the number of processes that
write them.
"""

import io
import json
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, pairwise, repeat
from pathlib import Path
from random import Random

from clipscale.common.errors import UserError, explained
from clipscale.common.files import user_cache
from clipscale.common.hardware import cores
from clipscale.common.terminal import say, tell, tracked
from clipscale.tools.data import scenes
from clipscale.tools.data.settings import DemoSettings

Sample = dict[str, str | bytes]
"""A sample as webdataset's writer takes it: `__key__`, and bytes by extension."""

RECIPE_VERSION = 3
"""Goes up with every change of pictures, captions or layout."""
SIDE = 30
"""Side of a picture in pixels."""
TRAIN_SHARDS = 16
TRAIN_MIX = {"one": 0.6, "across": 0.15, "down": 0.15, "row": 0.1}
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
    root = root or user_cache() / f"demo-{RECIPE_VERSION}"
    train = f"{root}/train/{{00000..{TRAIN_SHARDS - 1:05d}}}.tar"
    return DemoPaths(root, train, {name: root / name for name in TEST_SETS})


def main(settings: DemoSettings) -> Path:
    """Render the set unless it is there, and print where it is. Returns its folder."""
    place = paths(Path(settings.root).expanduser() if settings.root else None)
    verb = "written" if render_demo(place.root, settings.samples) else "already there"
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
        tell("data=demo: rendering the demo set")
        main(DemoSettings())


def render_demo(root: Path, train_samples: int = 20_000) -> bool:
    """Write the set to `root`, complete or not at all. False if a set of the same recipe is there already.

    Raises UserError if `root` holds something else.
    """
    recipe = f"{json.dumps({'recipe': RECIPE_VERSION, 'train_samples': train_samples})}\n".encode()
    note = root / "recipe.json"
    if note.is_file() and note.read_bytes() == recipe:
        return False
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        what = "it is of another size or version; " * note.is_file()
        raise UserError(f"root={root}: exists and is not this demo set; {what}remove it, or choose a new folder")
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
        other = UserError(f"root={root}: cannot be written ({error.strerror}); choose another folder")
        raise (other if explained(error) is error else explained(error)) from error
    return True


def _write_all(root: Path, train_samples: int) -> None:
    (root / "train").mkdir(parents=True)
    for name in TEST_SETS:
        (root / name / "test").mkdir(parents=True)
        (root / name / "test/nshards.txt").write_text("1\n")
    for name in TEST_SETS[:2]:
        (root / name / "classnames.txt").write_text("".join(f"{colour} {shape}\n" for colour, shape in scenes.CLASSES))
        (root / name / "zeroshot_classification_templates.txt").write_text("\n".join(scenes.TEMPLATES) + "\n")
    (root / "retrieval/dataset_type.txt").write_text("retrieval\n")
    # spawn: the caller may hold threads and locks; the fork server belongs to the loader's workers
    with ProcessPoolExecutor(min(cores(), 8), mp_context=multiprocessing.get_context("spawn")) as pool:
        rendered = partial(pool.map, chunksize=250)
        train = tracked(rendered(_train_sample, range(train_samples)), "rendering pictures", train_samples)
        sets = {
            "objects": rendered(_class_sample, count(), repeat("objects"), scenes.SEEN * OBJECTS_PER_CLASS),
            "unseen": rendered(_class_sample, count(), repeat("unseen"), scenes.UNSEEN * UNSEEN_PER_CLASS),
            "retrieval": rendered(_retrieval_sample, count(), _different_scenes()),
        }
        from clipscale.data.shards.writer import shard_writer  # here: webdataset loads torch, while others render

        bounds = [train_samples * number // TRAIN_SHARDS for number in range(TRAIN_SHARDS + 1)]
        shards: dict[str, Iterable[Sample]] = {
            f"train/{n:05d}.tar": islice(train, stop - start) for n, (start, stop) in enumerate(pairwise(bounds))
        }
        shards |= {f"{name}/test/0.tar": samples for name, samples in sets.items()}
        for path, samples in shards.items():
            with shard_writer(root / path) as writer:
                for sample in samples:
                    writer.write(sample)


def _train_sample(index: int) -> Sample:
    rng = Random(f"train/{index}")
    scene = scenes.compose(rng, rng.choices(*zip(*TRAIN_MIX.items()))[0])
    words = scenes.caption(scene, rng)
    # JPEG like web data, at a quality and chroma resolution that leave 30 pixels readable
    picture = _encode(scene, rng, "JPEG", quality=95, subsampling=0)
    key = f"{index:09d}"
    record = {"caption": words, "key": key, "status": "success", "width": SIDE, "height": SIDE}
    return {"__key__": key, "jpg": picture, "txt": words.encode(), "json": json.dumps(record).encode()}


def _class_sample(index: int, split: str, kind: scenes.Kind) -> Sample:
    picture = _encode(scenes.Scene("one", (kind,)), Random(f"{split}/{index}"), "PNG")
    return {"__key__": f"{index:06d}", "png": picture, "cls": str(scenes.CLASSES.index(kind)).encode()}


def _different_scenes() -> Iterator[scenes.Scene]:
    """So that every caption of the retrieval set has one right answer."""
    rng = Random("scenes")
    taken: set[scenes.Scene] = set()
    while len(taken) < RETRIEVAL_IMAGES:
        scene = scenes.compose(rng, rng.choice(("across", "down", "row")))
        if scene not in taken:
            taken.add(scene)
            yield scene


def _retrieval_sample(index: int, scene: scenes.Scene) -> Sample:
    rng = Random(f"retrieval/{index}")
    words: set[str] = set()
    while len(words) < CAPTIONS_PER_IMAGE:
        words.add(scenes.caption(scene, rng))
    return {"__key__": f"{index:06d}", "png": _encode(scene, rng, "PNG"), "txt": "\n".join(sorted(words)).encode()}


def _encode(scene: scenes.Scene, rng: Random, kind: str, **options: int) -> bytes:
    out = io.BytesIO()
    scenes.render(scene, rng, SIDE).save(out, kind, **options)
    return out.getvalue()
