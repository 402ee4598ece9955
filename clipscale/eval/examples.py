"""Saves retrieval examples for the report: for a few captions, the nearest images as one picture, described by a JSON file.

N: images, M: captions, D: feature width.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from clipscale import files
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.sample import BrokenSampleError
from clipscale.eval.sets.item import EvalSet, Picture

QUERIES, TOP, TILE = 8, 5, 112
"""Captions shown, images per caption, and the side of a thumbnail in pixels."""


@dataclass(frozen=True)
class Gallery:
    """The picture and what is in it. It is saved with the figures of its set."""

    name: str
    picture: Image.Image
    record: dict[str, Any]

    def file(self, run_dir: Path) -> Path:
        """`eval/retrieved/SET.json`."""
        return files.inner_folder(run_dir, "eval", "retrieved") / f"{self.name}.json"

    def save(self, run_dir: Path) -> None:
        """Write `eval/retrieved/SET.png` and `SET.json`, replacing those of another step. Raises OSError."""
        with files.replacing(self.file(run_dir).with_name(f"{self.name}.png")) as file:
            self.picture.save(file, format="PNG")
        files.write_json(self.file(run_dir), self.record)


def gallery(step: int | None, item: EvalSet, images_ND: Tensor, captions_MD: Tensor, usable_N: Tensor) -> Gallery:
    """A row has a caption's TOP nearest images, then the right one.

    The record has `tile`, `step`, and for every row its `caption` and `hit`: the column of the right image, or null if it is not found.
    """
    owner_M = torch.tensor(item.owner)
    candidates = usable_N.cpu()[owner_M].nonzero()[:, 0]
    queries = candidates[torch.linspace(0, len(candidates) - 1, min(QUERIES, len(candidates))).long()]
    scores = (captions_MD[queries.to(captions_MD.device)] @ images_ND.T).masked_fill(~usable_N, -torch.inf).cpu()
    nearest = scores.topk(min(TOP, int(usable_N.sum()))).indices

    grid = Image.new("RGB", (TILE * (TOP + 1), TILE * len(queries)), "white")
    rows = []
    for y, (query, found) in enumerate(zip(queries.tolist(), nearest.tolist())):
        right = item.owner[query]
        for x, index in [*enumerate(found), (TOP, right)]:
            grid.paste(thumbnail(item.images[index]), (x * TILE, y * TILE))
        rows.append({"caption": item.captions[query], "hit": found.index(right) if right in found else None})

    record = {"set": item.label(), "step": step, "tile": TILE, "columns": TOP, "rows": rows}
    return Gallery(item.label().replace("/", "-"), grid, record)


def thumbnail(picture: Picture) -> Image.Image:
    """The image with the model's crop, at the tile's size; grey where it is broken."""
    try:
        pixels = EvalTransform(TILE)(picture.read())
    except (BrokenSampleError, OSError):
        return Image.new("RGB", (TILE, TILE), "lightgrey")
    return Image.fromarray(pixels.transpose(1, 2, 0))
