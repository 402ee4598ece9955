"""Saves what a model gets wrong in a classification set, for the report: figures of classes, pairs it confuses, pictures it misses.

N: images, C: classes.
"""

import base64
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipscale import files
from clipscale.config.redact import redacted
from clipscale.eval.examples import thumbnail
from clipscale.eval.sets.item import EvalSet

CLASSES, PAIRS = 25_000, 100
"""Most classes of the table and pairs of confused classes; ImageNet-21k has 21,841 classes."""
WORST, OF_EACH, MISSES = 10, 6, 40
"""Classes whose missed pictures are shown, pictures of each, and pictures of other misses."""
NAME = 80
"""Characters of a class name."""


@dataclass(frozen=True)
class Misses:
    """What `eval/classes/SET.json` holds."""

    name: str
    record: dict[str, Any]

    def file(self, run_dir: Path) -> Path:
        """`eval/classes/SET.json`."""
        return files.inner_folder(run_dir, "eval", "classes") / f"{self.name.replace('/', '-')}.json"

    def save(self, run_dir: Path) -> None:
        """Write the file, replacing that of another step. Raises OSError."""
        files.write_json(self.file(run_dir), redacted(self.record))


def misses(step: int | None, item: EvalSet, counts_3C: Tensor, predicted_N: Tensor, margin_N: Tensor) -> Misses:
    """What a model gets wrong in a set. The misses with the largest margins come first.

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
    of_worst: dict[int, list[int]] = {c: [] for c in worst_first[:WORST]}
    for index in missed.tolist():
        found = of_worst.get(item.labels[index])
        if found is not None and len(found) < OF_EACH:
            found.append(index)

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
        "worst": [picture(index) for found in of_worst.values() for index in found],
        "largest": [picture(index) for index in missed[:MISSES].tolist()],
    }
    return Misses(item.label(), record)
