"""Where the demo set lies. Needs neither NumPy nor Pillow, so that a mistake in a command is answered without them."""

from collections.abc import Sequence
from pathlib import Path

from clipscale.common.files import user_cache

# Version of the set. Raise it with every change of pictures, captions or layout.
RECIPE_VERSION = 3
TRAIN_SHARDS = 16


def user_folder() -> Path:
    """The folder of the set that data=demo takes, which need not exist yet."""
    return user_cache() / f"demo-{RECIPE_VERSION}"


def train_shards(root: Path) -> str:
    """The set's shard list, for `data.train`."""
    return f"{root}/train/{{00000..{TRAIN_SHARDS - 1:05d}}}.tar"


def evaluation_sets(root: Path) -> list[str]:
    """The set's folders for `eval.sets`."""
    return [f"{root}/{name}" for name in ("objects", "unseen", "retrieval")]


def is_missing(sources: Sequence[str]) -> bool:
    """Whether the set of data=demo is one of the sources and is not there."""
    return train_shards(user_folder()) in sources and not user_folder().exists()
