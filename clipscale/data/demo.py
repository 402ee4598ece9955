"""The demo set: about 20k captioned pictures in LAION's shard layout, and held-out tests in CLIP_benchmark's.

Every picture is a pure function of (seed, split, index), so the bytes do not depend on how many processes write them.
"""

import io
import json
import logging
import multiprocessing
import shutil
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import platformdirs

from clipscale.config.tools import DemoSettings
from clipscale.data import scenes
from clipscale.errors import UserError
from clipscale.hardware import cores

log = logging.getLogger(__name__)

RECIPE_VERSION = 2
"""Raised whenever the pictures, captions or layout change, so that a cached set of an older recipe is rendered anew."""
SIDE = 30
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
    """Where a rendered demo set lies: `train` is a shard list as `data.train` takes it, `tests` are folders for `eval.sets`."""

    root: Path
    train: str
    tests: dict[str, Path]


def default_root() -> Path:
    """The demo set's place in the user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_dir("clipscale", appauthor=False)) / "demo"


def paths(root: Path | None = None) -> DemoPaths:
    """The parts of the demo set at `root`, whether or not it has been rendered yet."""
    root = root or default_root()
    return DemoPaths(
        root, f"{root}/train/{{00000..{TRAIN_SHARDS - 1:05d}}}.tar", {name: root / name for name in TEST_SETS}
    )


def main(settings: DemoSettings) -> Path:
    """Render (or find) the set and say where it is. Returns its folder."""
    place = Path(settings.root).expanduser() if settings.root else default_root()
    begun = time.monotonic()
    fresh = render_demo(place, seed=settings.seed, train_samples=settings.samples, force=settings.force)
    found = paths(place)
    verb = f"written in {time.monotonic() - begun:.1f} s" if fresh else "already there"
    print(f"demo set {verb}: {place}")
    print(f"  train      {settings.samples:6d} pairs   {found.train}")
    sizes = {
        "objects": len(scenes.SEEN) * OBJECTS_PER_CLASS,
        "unseen": len(scenes.UNSEEN) * UNSEEN_PER_CLASS,
        "retrieval": RETRIEVAL_IMAGES,
    }
    notes = {
        "objects": f"classification, {len(scenes.CLASSES)} names, held-out pictures",
        "unseen": f"the same names, the {len(scenes.UNSEEN)} combinations that training never shows",
        "retrieval": f"{CAPTIONS_PER_IMAGE} captions each",
    }
    for name, folder in found.tests.items():
        print(f"  {name:10s} {sizes[name]:6d} images  {folder}  ({notes[name]})")
    return place


def render_demo(root: Path, *, seed: int = 0, train_samples: int = 20_000, force: bool = False) -> bool:
    """Write the set to `root`, complete or not at all; True if it was rendered, False if the same recipe was already there.

    Raises UserError if `root` holds something that is not a demo set.
    """
    recipe = {"recipe": RECIPE_VERSION, "seed": seed, "train_samples": train_samples, "side": SIDE}
    if train_samples < TRAIN_SHARDS:
        raise UserError(
            f"samples={train_samples}: the demo set needs at least {TRAIN_SHARDS} training samples (one a shard)"
        )
    note = root / "recipe.json"
    if note.is_file():
        if not force and json.loads(note.read_text()) == recipe:
            return False
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"root={root}: exists and is not a demo set; choose an empty or new folder")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    except OSError as error:
        raise UserError(
            f"root={root}: cannot be written ({error.strerror}); choose another folder with root="
        ) from error
    try:
        _write_all(temporary, seed, train_samples)
        (temporary / "recipe.json").write_text(json.dumps(recipe) + "\n")
        temporary.chmod(0o755)
        _swap(temporary, root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _swap(new: Path, root: Path) -> None:
    """Put `new` in the place of `root`; a set rendered meanwhile by another process is as good as ours."""
    if root.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{root.name}-old-", dir=root.parent))
        root.rename(old / "set")
        new.rename(root)
        shutil.rmtree(old)
    else:
        new.rename(root)


def _write_all(root: Path, seed: int, train_samples: int) -> None:
    for name in ("train", *(f"{name}/test" for name in TEST_SETS)):
        (root / name).mkdir(parents=True)
    jobs: list[tuple[str, int, int, int, int]] = [
        ("train", shard, train_samples * shard // TRAIN_SHARDS, train_samples * (shard + 1) // TRAIN_SHARDS, seed)
        for shard in range(TRAIN_SHARDS)
    ]
    for name in TEST_SETS:
        jobs.append((name, 0, 0, 0, seed))
        _describe(root / name)
    processes = min(cores(), 8)
    # spawn: the caller may hold threads and locks, and the fork server is the loader workers', with what they need imported
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_write_shard, [str(root)] * len(jobs), *zip(*jobs)):
            pass


def _describe(folder: Path) -> None:
    """The text files that CLIP_benchmark's webdataset reader expects beside the shards."""
    (folder / "test" / "nshards.txt").write_text("1\n")
    if folder.name == "retrieval":
        (folder / "dataset_type.txt").write_text("retrieval\n")
        return
    (folder / "classnames.txt").write_text("".join(f"{colour} {shape}\n" for colour, shape in scenes.CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{line}\n" for line in scenes.TEMPLATES))


def _write_shard(root: str, split: str, shard: int, start: int, stop: int, seed: int) -> None:
    writers = {"train": _train_members, "retrieval": _retrieval_members}
    folder = Path(root) / (split if split == "train" else f"{split}/test")
    name = f"{shard:05d}.tar" if split == "train" else "0.tar"
    with tarfile.open(folder / name, "w", format=tarfile.USTAR_FORMAT) as tar:
        members = writers[split](shard, start, stop, seed) if split in writers else _class_members(split, seed)
        for member, data in members:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    if split == "train":
        stats = {"count": stop - start, "successes": stop - start, "failed_to_download": 0, "failed_to_resize": 0}
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats) + "\n")


def _train_members(shard: int, start: int, stop: int, seed: int) -> list[tuple[str, bytes]]:
    members = []
    for index in range(start, stop):
        rng = Random(f"{seed}/train/{index}")
        scene = scenes.compose(rng, rng.choices(KINDS, TRAIN_MIX)[0])
        words = scenes.caption(scene, rng)
        key = f"{shard:05d}{index - start:04d}"
        # JPEG like web data, at a quality and chroma resolution that leave 30 pixels readable
        picture = _encode(scene, rng, "JPEG", quality=95, subsampling=0)
        about = {
            "caption": words,
            "key": key,
            "status": "success",
            "width": SIDE,
            "height": SIDE,
            "kind": scene.kind,
            "relation": scene.relation,
            "things": [
                {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(thing).items()}
                for thing in scene.things
            ],
        }
        members += [
            (f"{key}.jpg", picture),
            (f"{key}.txt", words.encode()),
            (f"{key}.json", json.dumps(about).encode()),
        ]
    return members


def _class_members(split: str, seed: int) -> list[tuple[str, bytes]]:
    chosen, number = (scenes.SEEN, OBJECTS_PER_CLASS) if split == "objects" else (scenes.UNSEEN, UNSEEN_PER_CLASS)
    members = []
    for index in range(len(chosen) * number):
        rng = Random(f"{seed}/{split}/{index}")
        pair = chosen[index % len(chosen)]
        key = f"{index:06d}"
        label = str(scenes.CLASSES.index(pair)).encode()
        members += [(f"{key}.png", _encode(scenes.single(rng, pair), rng, "PNG")), (f"{key}.cls", label)]
    return members


def _retrieval_members(shard: int, start: int, stop: int, seed: int) -> list[tuple[str, bytes]]:
    """Images whose contents all differ, so that every caption has one right answer."""
    rng = Random(f"{seed}/retrieval")
    taken: set[tuple[str, ...]] = set()
    members = []
    while len(taken) < RETRIEVAL_IMAGES:
        scene = scenes.compose(rng, rng.choices(KINDS, RETRIEVAL_MIX)[0])
        if scene.content() in taken:
            continue
        words: dict[str, None] = {}
        while len(words) < CAPTIONS_PER_IMAGE:
            words[scenes.caption(scene, rng)] = None
        key = f"{len(taken):06d}"
        taken.add(scene.content())
        members += [(f"{key}.png", _encode(scene, rng, "PNG")), (f"{key}.txt", "\n".join(words).encode())]
    return members


def _encode(scene: scenes.Scene, rng: Random, kind: str, **options: int) -> bytes:
    out = io.BytesIO()
    scenes.render(scene, rng, SIDE).save(out, kind, **options)
    return out.getvalue()
