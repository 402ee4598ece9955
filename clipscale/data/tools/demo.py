"""The demo set: about 20k captioned pictures in LAION's shard layout, and held-out test sets in CLIP_benchmark's.

Every picture is a pure function of (seed, split, index), so the bytes do not depend on the number of processes that write them.
"""

import io
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import cores
from clipscale.common.terminal import say
from clipscale.config.tools import DemoSettings
from clipscale.data.shards.addresses import user_cache
from clipscale.data.tools import scenes

Sample = dict[str, str | bytes]
"""A sample as webdataset's writer takes it: `__key__`, and bytes by extension."""

RECIPE_VERSION = 2
"""Goes up with every change of pictures, captions or layout. A cached set of an older version is rendered anew."""
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


def default_root() -> Path:
    """The demo set's folder in the user's cache (XDG_CACHE_HOME is honoured)."""
    return user_cache() / "demo"


def paths(root: Path | None = None) -> DemoPaths:
    """The paths of the demo set at `root`, which need not exist yet."""
    root = root or default_root()
    train = f"{root}/train/{{00000..{TRAIN_SHARDS - 1:05d}}}.tar"
    return DemoPaths(root, train, {name: root / name for name in TEST_SETS})


def main(settings: DemoSettings) -> Path:
    """Render the set unless it is there, and print where it is. Returns its folder."""
    place = Path(settings.root).expanduser() if settings.root else default_root()
    begun = time.monotonic()
    fresh = render_demo(place, seed=settings.seed, train_samples=settings.samples, force=settings.force)
    found = paths(place)
    verb = f"written in {time.monotonic() - begun:.1f} s" if fresh else "already there"
    say(f"demo set {verb}: {place}")
    say(f"  train      {settings.samples:6d} pairs   {found.train}")
    objects, unseen = len(scenes.SEEN) * OBJECTS_PER_CLASS, len(scenes.UNSEEN) * UNSEEN_PER_CLASS
    sizes = {
        "objects": (objects, f"classification, {len(scenes.CLASSES)} names, held-out pictures"),
        "unseen": (unseen, f"the same names, the {len(scenes.UNSEEN)} combinations that training never shows"),
        "retrieval": (RETRIEVAL_IMAGES, f"{CAPTIONS_PER_IMAGE} captions each"),
    }
    for name, (size, note) in sizes.items():
        say(f"  {name:10s} {size:6d} images  {found.tests[name]}  ({note})")
    return place


def render_demo(root: Path, *, seed: int = 0, train_samples: int = 20_000, force: bool = False) -> bool:
    """Write the set to `root`, complete or not at all. False if a set of the same recipe was already there.

    Raises UserError if `root` holds something else.
    """
    recipe = {"recipe": RECIPE_VERSION, "seed": seed, "train_samples": train_samples, "side": SIDE}
    if train_samples < TRAIN_SHARDS:
        raise UserError(f"samples={train_samples}: the demo set needs at least {TRAIN_SHARDS}, one for each shard")
    note = root / "recipe.json"
    if note.is_file():
        with suppress(OSError, ValueError):  # another file of that name
            if not force and files.read_json(note) == recipe:
                return False
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"root={root}: exists and is not a demo set; choose an empty or new folder")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    except OSError as error:
        raise UserError(f"root={root}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        _write_all(temporary, seed, train_samples)
        (temporary / "recipe.json").write_text(json.dumps(recipe) + "\n")
        temporary.chmod(0o755)
        _swap(temporary, root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _swap(new: Path, root: Path) -> None:
    """Put `new` in the place of `root`, a demo set that another process may have put there meanwhile.

    Raises UserError if `root` holds anything that is no file of a demo set: only these are deleted.
    """
    if not root.exists():
        new.rename(root)
        return
    if foreign := sorted(_names(root) - _names(new)):
        raise UserError(
            f"root={root}: holds {', '.join(foreign[:3])}{', ...' * (len(foreign) > 3)}, which the demo set does not have; "
            "move what you need away, or choose another folder"
        )
    old = Path(tempfile.mkdtemp(prefix=f".{root.name}-old-", dir=root.parent))
    root.rename(old / "set")
    new.rename(root)
    shutil.rmtree(old)


def _names(root: Path) -> set[str]:
    """Everything below a folder, by relative path; a link's path ends with @."""
    return {f"{path.relative_to(root)}{'@' * path.is_symlink()}" for path in root.rglob("*")}


def _write_all(root: Path, seed: int, train_samples: int) -> None:
    for name in ("train", *(f"{name}/test" for name in TEST_SETS)):
        (root / name).mkdir(parents=True)
    shards: dict[Path, Callable[[], Iterator[Sample]]] = {
        root / "objects/test/0.tar": partial(_class_samples, "objects", scenes.SEEN, OBJECTS_PER_CLASS, seed),
        root / "unseen/test/0.tar": partial(_class_samples, "unseen", scenes.UNSEEN, UNSEEN_PER_CLASS, seed),
        root / "retrieval/test/0.tar": partial(_retrieval_samples, seed),
    }
    for shard in range(TRAIN_SHARDS):
        start, stop = (train_samples * number // TRAIN_SHARDS for number in (shard, shard + 1))
        shards[root / f"train/{shard:05d}.tar"] = partial(_train_samples, shard, start, stop, seed)
        stats = {"count": stop - start, "successes": stop - start, "failed_to_download": 0, "failed_to_resize": 0}
        (root / f"train/{shard:05d}_stats.json").write_text(json.dumps(stats) + "\n")
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


def _train_samples(shard: int, start: int, stop: int, seed: int) -> Iterator[Sample]:
    for index in range(start, stop):
        rng = Random(f"{seed}/train/{index}")
        scene = scenes.compose(rng, rng.choices(KINDS, TRAIN_MIX)[0])
        words = scenes.caption(scene, rng)
        key = f"{shard:05d}{index - start:04d}"
        # JPEG like web data, at a quality and chroma resolution that leave 30 pixels readable
        picture = _encode(scene, rng, "JPEG", quality=95, subsampling=0)
        things = [
            {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(thing).items()} for thing in scene.things
        ]
        about = {"caption": words, "key": key, "status": "success", "width": SIDE, "height": SIDE}
        about |= {"kind": scene.kind, "relation": scene.relation, "things": things}
        yield {"__key__": key, "jpg": picture, "txt": words.encode(), "json": json.dumps(about).encode()}


def _class_samples(split: str, classes: tuple[tuple[str, str], ...], number: int, seed: int) -> Iterator[Sample]:
    for index in range(len(classes) * number):
        rng = Random(f"{seed}/{split}/{index}")
        pair = classes[index % len(classes)]
        label = str(scenes.CLASSES.index(pair)).encode()
        yield {"__key__": f"{index:06d}", "png": _encode(scenes.single(rng, pair), rng, "PNG"), "cls": label}


def _retrieval_samples(seed: int) -> Iterator[Sample]:
    """Images whose contents all differ, so that every caption has one right answer."""
    rng = Random(f"{seed}/retrieval")
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
