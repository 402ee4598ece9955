"""`clipscale data select`: decides from the features of a set how often training takes each of its samples.

It keeps the pairs whose picture and text fit, then the best pair of near-duplicates, and then weighs by clusters. A
page beside the weights shows what goes and what stays at each threshold. A sample is its number in the set.
N: samples.
"""

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line
from clipscale.data.hashing import utf8
from clipscale.data.sample import BrokenSampleError
from clipscale.distributed.join import init_world
from clipscale.tools.data.near import Load, near_duplicates, nearest_clusters
from clipscale.tools.data.settings import SelectSettings
from clipscale.tools.embed.arrays import EmbeddedSet, Sample, open_embedded_set
from clipscale.tools.embed.pictures import stored_picture, thumbnail
from clipscale.tools.embed.settings import IMAGE, TEXT

if TYPE_CHECKING:
    from pyarrow import Array

# Examples on each side of a threshold.
EXAMPLES = 16
# Pixels of the longer side of a picture on the page.
SIDE = 128


def main(words: Sequence[str], settings: SelectSettings) -> None:
    """Write the weights and the page. Raises UserError."""
    out = Path(settings.out).expanduser()
    page_file = out.with_suffix(".html")
    if out.exists() or page_file.exists():
        raise UserError(f"out={out}: it, or {page_file}, exists; remove both, or choose another file")
    embedded = open_embedded_set(Path(*words).expanduser())
    embedded.warn_of_unfinished()
    keys = keys_of(embedded)
    weights, shown = choose(embedded, settings, out.parent)
    with embedded.damage_to_user_error():
        text = selection_page(embedded, **shown)
    write_weights(out, keys, weights)
    files.write_text(page_file, text)
    print_line(f"{out}: look at {page_file}, then train with data.sample_weights={out}")


def choose(embedded: EmbeddedSet, settings: SelectSettings, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Choose the weights (N,). Returns them, and what the page shows. A copy of the features is in `folder` meanwhile.

    Raises UserError if no sample can be used.
    """
    cosines = torch.from_numpy(np.concatenate([*map(products, embedded.features(IMAGE), embedded.features(TEXT))]))
    cosines[~cosines.isfinite()] = torch.nan
    kept = cosines.argsort(descending=True, stable=True)[int(cosines.isnan().sum()) :]  # NaN comes first
    print_line(f"{len(cosines):,} samples, {len(kept):,} with a usable picture and text")
    if not len(kept):
        raise UserError(f"{embedded.folder}: no sample can be used; embed other shards")
    shown = {"cosines": cosines}
    if settings.best is not None:
        count = max(1, round(settings.best * len(kept)))
        shown |= {"unfit": kept[count:][:EXAMPLES], "fit": kept[:count][-EXAMPLES:]}
        kept = kept[:count]
        print_line(
            f"best={settings.best:g}: {count:,} stay, whose picture and text have a cosine of {cosines[kept].min():.4f}"
        )
    weights = torch.zeros(len(cosines))
    weights[kept] = 1
    if settings.duplicates is not None or settings.power < 1:
        load = loader(embedded, folder, init_world(settings.device).device)
        clusters = nearest_clusters(load, kept, settings.clusters or round(len(kept) ** 0.5))
    if settings.duplicates is not None:
        largest, nearest = near_duplicates(load, kept, clusters, settings.duplicates)
        before = len(kept)
        order = kept[largest[kept].argsort()]
        stays = largest[kept] < settings.duplicates
        weights[kept[~stays]] = 0
        kept = kept[stays]
        clusters = clusters[stays]
        shown |= {"largest": largest, "nearest": nearest}
        shown |= {"copies": order[len(kept) :][:EXAMPLES], "different": order[: len(kept)][-EXAMPLES:]}
        print_line(f"duplicates={settings.duplicates:g}: {len(kept):,} stay")
        if 2 * len(kept) < before:
            print_line(
                f"duplicates={settings.duplicates:g} drops more than half, {before - len(kept):,} of {before:,}: look "
                "at the page, whether those that go are copies; a larger cosine drops fewer"
            )
    if settings.power < 1:
        sizes = clusters[:, 0].bincount()
        weights[kept] = sizes[clusters[:, 0]] ** (settings.power - 1)
        weights *= len(kept) / weights.sum()
        span = f"weights from {weights[kept].min():.3g} to {weights.max():.3g}"
        print_line(f"power={settings.power:g}: {span} in {int(sizes.count_nonzero()):,} clusters")
    return weights, shown


def products(images: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """The dot product of each row of images with its row of texts, without a copy of them."""
    return np.einsum("nd,nd->n", images, texts, dtype=np.float32)


def loader(embedded: EmbeddedSet, folder: Path, device: torch.device) -> Load:
    """Copy the pictures' features into one array on the disk, which disappears with this process.

    Returns a function that reads rows of it.
    """
    with TemporaryFile(dir=folder) as file:
        for array in embedded.features(IMAGE):
            array.tofile(file)
        file.flush()
        rows = np.memmap(file, embedded.note["dtype"], "r").reshape(len(embedded), -1)
    return lambda numbers: torch.from_numpy(rows[numbers.numpy()]).to(device, torch.float32)


def keys_of(embedded: EmbeddedSet) -> "Array":
    """The samples' keys. Raises UserError for damaged ones, and if one comes twice: sample weights go by key."""
    import pyarrow

    with embedded.damage_to_user_error():
        keys = pyarrow.array([utf8(json.loads(line)["key"]) for path in embedded.paths for line in path.open()])
        if len(keys) != len(embedded):
            raise ValueError(f"{len(keys)} keys of {len(embedded)} samples")
    different = keys.value_counts()
    counts = different.field("counts").to_numpy()
    if (counts > 1).any():
        key = different.field("values")[int(counts.argmax())]
        raise UserError(
            f"data: {embedded.folder}: {counts.max():,} samples have the key {key}, and sample weights go by key; give "
            "each sample in the shards a key of its own, and embed them again"
        )
    return keys


def write_weights(out: Path, keys: "Array", weights: Tensor) -> None:
    """Write a Parquet file of the samples' keys and weights; 0 leaves out."""
    import pyarrow
    from pyarrow.parquet import write_table

    with files.replacing(out) as file:
        write_table(pyarrow.table({"key": keys, "weight": weights.numpy()}), file)


def selection_page(embedded: EmbeddedSet, **shown: Tensor) -> str:
    """The page, in one file. What comes from the set is escaped, and the page runs no script."""
    from jinja2 import Environment, FileSystemLoader

    def sample(number: Tensor) -> Sample:
        """A sample, with its picture as a small JPEG in base64 if that can be read."""
        sample = embedded.sample(int(number))
        with suppress(BrokenSampleError):
            jpeg = thumbnail(stored_picture(embedded, sample), SIDE)
            sample["jpeg"] = base64.b64encode(jpeg).decode()
        return sample

    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return templates.get_template("select.html").render(name=embedded.folder.name, sample=sample, **shown)
