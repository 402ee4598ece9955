"""Pictures for the report: the images found for some captions, and what a model gets wrong in a classification set.

N: images, M: captions, C: classes, D: feature width.
"""

import base64
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from clipscale.common import files
from clipscale.config.redact import redacted
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.sample import BrokenSampleError
from clipscale.eval.sets.item import EvalSet, Picture

QUERIES, TOP, TILE = 8, 5, 112
"""Captions shown, images per caption, and the side of a thumbnail in pixels."""
CLASSES, PAIRS = 25_000, 100
"""Most classes of the table and pairs of confused classes; ImageNet-21k has 21,841 classes."""
WORST, OF_EACH, MISSES = 10, 6, 40
"""Classes whose missed pictures are shown, pictures of each, and pictures of other misses."""
NAME = 80
"""Characters of a class name."""


@dataclass(frozen=True)
class Examples:
    """What the report shows of a set: `eval/FOLDER/SET.json`, with its `set` and `step`, and a picture beside it."""

    folder: str
    record: dict[str, Any]
    picture: Image.Image | None = None

    def file(self, run_dir: Path) -> Path:
        """The JSON file."""
        return files.inner_folder(run_dir, "eval", self.folder) / f"{self.record['set'].replace('/', '-')}.json"

    def save(self, run_dir: Path) -> None:
        """Write the files, replacing those of another step. Raises OSError."""
        path = self.file(run_dir)
        if self.picture:
            with files.replacing(path.with_name(f"{path.stem}.png")) as file:
                self.picture.save(file, format="PNG")
        files.write_json(path, redacted(self.record))


def gallery(step: int | None, item: EvalSet, images_ND: Tensor, captions_MD: Tensor, usable_N: Tensor) -> Examples:
    """For a few captions, a row of the TOP nearest images, then the right one.

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
    return Examples("retrieved", {"set": item.label(), "step": step, "tile": TILE, "columns": TOP, "rows": rows}, grid)


def misses(step: int | None, item: EvalSet, counts_3C: Tensor, predicted_N: Tensor, margin_N: Tensor) -> Examples:
    """Figures of classes, pairs that the model confuses, and pictures that it misses, those with the largest margins first.

    counts_3C: images, top-1 and top-5 hits of each class. predicted_N: the class with the highest score.

    margin_N: how far that is above the right class's; NaN for a picture without scores, which is not shown.
    """
    labels = torch.tensor(item.labels)
    predicted_N, margin_N, counts = predicted_N.cpu(), margin_N.cpu(), counts_3C.cpu().tolist()
    missed = ((predicted_N != labels) & margin_N.isfinite()).nonzero()[:, 0]
    missed = missed[margin_N[missed].argsort(descending=True, stable=True)]
    pairs = Counter(zip(labels[missed].tolist(), predicted_N[missed].tolist()))
    present = [c for c in range(len(item.classnames)) if counts[0][c]]
    worst_first = sorted(present, key=lambda c: (counts[1][c] / counts[0][c], -counts[0][c], c))
    of_class: dict[int, list[int]] = {}
    for index in missed.tolist():
        of_class.setdefault(item.labels[index], []).append(index)

    def named(label: int) -> str:
        return item.classnames[label][:NAME]

    def picture(index: int) -> dict[str, Any]:
        out = io.BytesIO()
        thumbnail(item.images[index]).save(out, "JPEG", quality=85)
        names = {"right": named(item.labels[index]), "predicted": named(int(predicted_N[index]))}
        return names | {"margin": float(margin_N[index]), "jpeg": base64.b64encode(out.getvalue()).decode()}

    record = {
        "set": item.label(),
        "step": step,
        "images": len(item),
        "misses": len(item) - sum(counts[1]),
        "classes": [[named(c), *(counts[row][c] for row in range(3))] for c in worst_first[:CLASSES]],
        "pairs": [[named(right), named(other), count] for (right, other), count in pairs.most_common(PAIRS)],
        "worst": [picture(index) for c in worst_first[:WORST] for index in of_class.get(c, [])[:OF_EACH]],
        "largest": [picture(index) for index in missed[:MISSES].tolist()],
    }
    return Examples("classes", record)


def thumbnail(picture: Picture) -> Image.Image:
    """The image with the model's crop, at the tile's size; grey where it is broken."""
    try:
        pixels = EvalTransform(TILE)(picture.read())
    except (BrokenSampleError, OSError):
        return Image.new("RGB", (TILE, TILE), "lightgrey")
    return Image.fromarray(pixels.transpose(1, 2, 0))
