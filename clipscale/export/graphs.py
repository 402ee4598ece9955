"""The towers as graphs for other runtimes: ONNX, checked by ONNX Runtime, and programs of torch.export.

A graph takes what the tower takes: `image` uint8 pixels (N, 3, S, S), which it normalises itself, `text` int64 tokens (N, T). It gives
unit features (N, D), float32. N is free.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.models.towers import ClipModel

CLOSE = 1e-4
"""Largest difference of a unit feature between the model and its graph."""
SHAPES = ({0: torch.export.Dim("N", min=1)},)


def write_onnx(model: ClipModel, out: Path) -> str:
    """Write image.onnx and text.onnx; returns the call that loads one. Raises UserError where ONNX Runtime computes something else."""
    import onnxruntime

    for name, tower, inputs in towers(model):
        path = out / f"{name}.onnx"
        for old in (path, path.with_name(f"{path.name}.data")):
            old.unlink(missing_ok=True)  # it may be a link
        program = torch.onnx.export(
            tower, (inputs,), input_names=["input"], output_names=["features"], dynamic_shapes=SHAPES, verbose=False
        )
        assert program is not None
        program.save(str(path))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for given in (inputs, inputs[:1]):
            (found,) = session.run(None, {"input": given.numpy()})
            check(tower, given, torch.from_numpy(found), f"to=onnx: {path}")
    return f"onnxruntime.InferenceSession('{out.resolve()}/image.onnx')"


def write_torch(model: ClipModel, out: Path) -> str:
    """Write image.pt2 and text.pt2; returns the call that loads one. Raises UserError where they compute something else."""
    for name, tower, inputs in towers(model):
        path = out / f"{name}.pt2"
        path.unlink(missing_ok=True)  # it may be a link
        program = torch.export.export(tower, (inputs,), dynamic_shapes=SHAPES)
        torch.export.save(program, path)
        check(tower, inputs[:1], torch.export.load(path).module()(inputs[:1]), f"to=torch: {path}")
    return f"torch.export.load('{out.resolve()}/image.pt2').module()"


def towers(model: ClipModel) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, tower and inputs to trace it with: noise, and captions of several lengths."""
    side, generator = model.image_size, torch.Generator().manual_seed(0)
    yield "image", model.image, torch.randint(0, 256, (3, 3, side, side), generator=generator, dtype=torch.uint8)
    yield "text", model.text, model.tokenizer(["a red ring", "two cats on a chair", "it"]).long()


def check(tower: nn.Module, inputs: Tensor, found: Tensor, what: str) -> None:
    """Raise UserError for features that are further than CLOSE from those of the tower."""
    with torch.no_grad():
        worst = float((tower(inputs) - found).abs().max())
    if not worst <= CLOSE:
        raise UserError(
            f"{what} gives features that differ by {worst:.1e} from the run's, more than {CLOSE:g}; do not use it"
        )
