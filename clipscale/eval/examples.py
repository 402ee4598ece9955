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
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.sample import BrokenSampleError
from clipscale.eval.sets.item import EvalSet, ImageRef

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
    """What the report shows of a set: a record, and for retrieval a picture."""

    folder: str
    record: dict[str, Any]
    picture: Image.Image | None = None

    def save(self, run_dir: Path, label: str, step: int | None) -> None:
        """Write `eval/FOLDER/SET.json` and the picture beside it, replacing those of another step. Raises OSError."""
        path = run_dir / "eval" / self.folder / f"{label.replace('/', '-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.picture:
            self.picture.save(path.with_suffix(".png"))
        files.write_json(path, {"set": label, "step": step} | self.record)


def gallery(eval_set: EvalSet, images_ND: Tensor, captions_MD: Tensor, usable_N: Tensor) -> Examples:
    """For a few captions, a row of the TOP nearest images, then the right one.

    The record has `tile`, `columns`, and for every row its `caption` and `hit`: the column of the right image, or null.
    """
    owner_M = torch.tensor(eval_set.owner)
    candidates = usable_N.cpu()[owner_M].nonzero()[:, 0]
    queries = candidates[torch.linspace(0, len(candidates) - 1, min(QUERIES, len(candidates))).long()]
    scores = (captions_MD[queries.to(captions_MD.device)] @ images_ND.T).masked_fill(~usable_N, -torch.inf).cpu()
    nearest = scores.topk(min(TOP, int(usable_N.sum()))).indices

    grid = Image.new("RGB", (TILE * (TOP + 1), TILE * len(queries)), "white")
    rows = []
    for y, (query, images) in enumerate(zip(queries.tolist(), nearest.tolist())):
        right = eval_set.owner[query]
        for x, index in [*enumerate(images), (TOP, right)]:
            grid.paste(thumbnail(eval_set.images[index]), (x * TILE, y * TILE))
        rows.append({"caption": eval_set.captions[query], "hit": images.index(right) if right in images else None})
    return Examples("retrieved", {"tile": TILE, "columns": TOP, "rows": rows}, grid)


def misses(eval_set: EvalSet, counts_3C: Tensor, predicted_N: Tensor, margin_N: Tensor) -> Examples:
    """Accuracies of classes, pairs that the model confuses, and pictures that it misses, those with the largest margins
    first.

    counts_3C: images, top-1 and top-5 hits of each class. predicted_N: the class with the highest score. margin_N: how
    far that is above the right class's; NaN for a picture without scores, which is not shown.
    """
    labels = torch.tensor(eval_set.labels)
    predicted_N, margin_N, counts = predicted_N.cpu(), margin_N.cpu(), counts_3C.cpu().tolist()
    missed = ((predicted_N != labels) & margin_N.isfinite()).nonzero()[:, 0]
    missed = missed[margin_N[missed].argsort(descending=True, stable=True)]
    pairs = Counter(zip(labels[missed].tolist(), predicted_N[missed].tolist()))
    present = [c for c in range(len(eval_set.classnames)) if counts[0][c]]
    worst_first = sorted(present, key=lambda c: (counts[1][c] / counts[0][c], -counts[0][c], c))
    of_class: dict[int, list[int]] = {}
    for index in missed.tolist():
        of_class.setdefault(eval_set.labels[index], []).append(index)

    def name(label: int) -> str:
        return eval_set.classnames[label][:NAME]

    def picture(index: int) -> dict[str, Any]:
        out = io.BytesIO()
        thumbnail(eval_set.images[index]).save(out, "JPEG", quality=85)
        names = {"right": name(eval_set.labels[index]), "predicted": name(int(predicted_N[index]))}
        return names | {"margin": float(margin_N[index]), "jpeg": base64.b64encode(out.getvalue()).decode()}

    record = {
        "images": len(eval_set),
        "misses": len(eval_set) - sum(counts[1]),
        "classes": [[name(c), *(counts[row][c] for row in range(3))] for c in worst_first[:CLASSES]],
        "pairs": [[name(right), name(other), count] for (right, other), count in pairs.most_common(PAIRS)],
        "worst": [picture(index) for c in worst_first[:WORST] for index in of_class.get(c, [])[:OF_EACH]],
        "largest": [picture(index) for index in missed[:MISSES].tolist()],
    }
    return Examples("classes", record)


def thumbnail(image: ImageRef) -> Image.Image:
    """The image with the model's crop, at the tile's size; grey where it is broken."""
    try:
        pixels = EvalTransform(TILE)(image.read())
    except (BrokenSampleError, OSError):
        return Image.new("RGB", (TILE, TILE), "lightgrey")
    return Image.fromarray(pixels.transpose(1, 2, 0))
