"""The verb `clipscale export`."""

import importlib
from dataclasses import replace
from pathlib import Path

import torch

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.config.tools import ExportSettings, check_run
from clipscale.export import graphs, hugging_face, open_clip
from clipscale.export.card import card
from clipscale.models.towers import build_model, load_model

NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime")}
"""Packages of a format, in the extra of its name."""
LIBRARIES = {"open_clip": "open_clip", "hf": "transformers", "onnx": "onnx", "torch": "pytorch"}
"""What loads each format, by its name on Hugging Face."""


def main(settings: ExportSettings) -> Path:
    """Write the folder and return it. Raises UserError without a readable checkpoint, for a model that the format cannot hold, and if
    the folder cannot be written."""
    folder = check_run(settings)
    for package in NEEDED.get(settings.to, ()):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"to={settings.to} needs {package}; pip install 'clipscale[{settings.to}]'") from error
    model, config, step = load_model(folder, settings.checkpoint, settings.weights, hub=settings.hub)
    name = "export" if settings.to == "open_clip" else f"export-{settings.to}"
    out = Path(settings.out).expanduser() if settings.out else folder / name
    note = {"run": folder.name, "step": str(step), "weights": settings.weights}
    try:
        files.inner_folder(*((out,) if settings.out else (folder, out.name)))
        if settings.to in ("open_clip", "hf"):
            write = open_clip.write if settings.to == "open_clip" else hugging_face.write
            call = write(model, config, out, getattr(torch, settings.dtype), note)
        else:
            plain = build_model(replace(config, lean=False)).eval()  # open_clip's own forward pass
            plain.load_state_dict(model.state_dict())
            call = (graphs.write_onnx if settings.to == "onnx" else graphs.write_torch)(plain, out)
        files.write_text(out / "README.md", card(folder, model, config, note, call, LIBRARIES[settings.to]))
    except OSError as error:
        raise UserError(f"out={out}: cannot be written ({error.strerror or error}); choose another folder") from error
    say(f"{out}: step {step}; {call}")
    return out
