"""Pictures for the report: the images found for some captions.

N: images, M: captions, D: feature width.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from clipscale.common import files
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.sample import BrokenSampleError
from clipscale.eval.sets.item import ImageRef

if TYPE_CHECKING:
    from clipscale.eval.retrieval import RetrievalSet

QUERIES, TOP, TILE = 8, 5, 112
"""Captions shown, images per caption, and the side of a thumbnail in pixels."""


def gallery(
    eval_set: "RetrievalSet", images_ND: Tensor, captions_MD: Tensor, usable_N: Tensor, run_dir: Path, step: int | None
) -> None:
    """Write `eval/retrieved/step_N/SET.png`, for a few captions a row of the TOP nearest images and then the right one,
    and SET.json beside it: `tile`, `columns`, and for every row its `caption` and `hit`, the column of the right image
    or null. Without a step the folder is `eval/retrieved`. Raises OSError.
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
    folder = run_dir / "eval" / "retrieved" / ("" if step is None else f"step_{step:08d}")
    path = folder / f"{eval_set.label.replace('/', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path.with_suffix(".png"))
    files.write_json(path, {"set": eval_set.label, "step": step, "tile": TILE, "columns": TOP, "rows": rows})


def thumbnail(image: ImageRef) -> Image.Image:
    """The image with the model's crop, at the tile's size; grey where it is broken."""
    try:
        pixels = EvalTransform(TILE)(image.read())
    except (BrokenSampleError, OSError):
        return Image.new("RGB", (TILE, TILE), "lightgrey")
    return Image.fromarray(pixels.transpose(1, 2, 0))
