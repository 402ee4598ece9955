"""The demo set: about 20k captioned pictures in LAION's shard layout, and held-out test sets in CLIP_benchmark's.

Every picture is a pure function of (split, index).
"""

import io
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from clipscale.common import files
from clipscale.common.cpu import cores
from clipscale.common.process_pool import pool_map, spawned_pool
from clipscale.common.terminal import print_line, tracked
from clipscale.data.shards.writer import shard_writer
from clipscale.tools.data import scenes
from clipscale.tools.data.demo_folder import TRAIN_SHARDS, user_folder

# A sample as `shard_writer` takes it: `__key__`, and bytes by extension.
Sample = dict[str, str | bytes]

TRAIN_MIX = {"one": 0.6, "across": 0.15, "down": 0.15, "row": 0.1}
OBJECTS_PER_CLASS = 20
UNSEEN_PER_CLASS = 60
RETRIEVAL_IMAGES = 500
CAPTIONS_PER_IMAGE = 5


def main(_: object = None) -> None:
    """Render the set in the user's cache unless it is there, and print where it is."""
    root = user_folder()
    if not root.exists():
        render_demo(root, processes=cores())
    print_line(f"the demo set is in {root}; data=demo takes it")


def render_demo(root: Path, train_samples: int = 20_000, processes: int = 1) -> None:
    """Write the set to the new folder `root`, complete or not at all. Raises UserError if it cannot be written."""
    with files.damage_to_user_error(
        "the demo set cannot be written", root, "remove what is there, or set XDG_CACHE_HOME"
    ):
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as temporary:
            new = Path(temporary) / "new"
            _write_training(new / "train", train_samples, processes)
            _write_test_sets(new)
            new.rename(root)


def _write_training(folder: Path, count: int, processes: int) -> None:
    size = -(-count // TRAIN_SHARDS)
    folder.mkdir(parents=True)
    write = partial(_write_training_shard, folder, size, count)
    if processes == 1:
        for number in range(TRAIN_SHARDS):
            write(number)
        return
    with spawned_pool(processes) as pool:
        for _ in tracked(pool_map(pool, write, range(TRAIN_SHARDS)), "rendering shards", TRAIN_SHARDS):
            pass


def _write_training_shard(folder: Path, size: int, count: int, number: int) -> None:
    """Write the shard with this number. It has `size` of all `count` samples."""
    _write_shard(folder / f"{number:05d}.tar", map(_train, range(count)[number * size : (number + 1) * size]))


def _write_test_sets(root: Path) -> None:
    texts = {
        "classnames.txt": "".join(f"{colour} {shape}\n" for colour, shape in scenes.CLASSES),
        "zeroshot_classification_templates.txt": "\n".join(scenes.TEMPLATES) + "\n",
    }
    for name, kinds in ("objects", scenes.SEEN * OBJECTS_PER_CLASS), ("unseen", scenes.UNSEEN * UNSEEN_PER_CLASS):
        _write_test_set(root / name, _objects(name, kinds), texts)
    _write_test_set(root / "retrieval", _retrieval(), {"dataset_type.txt": "retrieval\n"})


def _write_test_set(folder: Path, samples: Iterable[Sample], texts: dict[str, str]) -> None:
    _write_shard(folder / "test/0.tar", samples)
    for name, text in {"test/nshards.txt": "1\n", **texts}.items():
        (folder / name).write_text(text)


def _write_shard(path: Path, samples: Iterable[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with shard_writer(path) as writer:
        for sample in samples:
            writer.write(sample)


def _train(index: int) -> Sample:
    rng = Random(f"train/{index}")
    scene = scenes.compose(rng, rng.choices(*zip(*TRAIN_MIX.items()))[0])
    words = scenes.caption(scene, rng)
    # JPEG like web data, at a quality and chroma resolution that leave 30 pixels readable
    picture = _encode(scene, rng, "JPEG", quality=95, subsampling=0)
    key = f"{index:09d}"
    record = {"caption": words, "key": key, "status": "success", "width": scenes.SIDE, "height": scenes.SIDE}
    return {"__key__": key, "jpg": picture, "txt": words.encode(), "json": json.dumps(record).encode()}


def _objects(split: str, classes: Sequence[scenes.ShapeClass]) -> Iterator[Sample]:
    for index, shown_class in enumerate(classes):
        picture = _encode(scenes.Scene("one", (shown_class,)), Random(f"{split}/{index}"), "PNG")
        yield {"__key__": f"{index:06d}", "png": picture, "cls": str(scenes.CLASSES.index(shown_class)).encode()}


def _retrieval() -> Iterator[Sample]:
    """Yield scenes that differ, so that every caption has one right answer."""
    rng = Random("scenes")
    different: dict[scenes.Scene, None] = {}
    while len(different) < RETRIEVAL_IMAGES:
        different[scenes.compose(rng, rng.choice(("across", "down", "row")))] = None
    for index, scene in enumerate(different):
        rng = Random(f"retrieval/{index}")
        words: set[str] = set()
        while len(words) < CAPTIONS_PER_IMAGE:
            words.add(scenes.caption(scene, rng))
        text = "\n".join(sorted(words)).encode()
        yield {"__key__": f"{index:06d}", "png": _encode(scene, rng, "PNG"), "txt": text}


def _encode(scene: scenes.Scene, rng: Random, image_format: str, **options: int) -> bytes:
    out = io.BytesIO()
    scenes.render(scene, rng).save(out, image_format, **options)
    return out.getvalue()
