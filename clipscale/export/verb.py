"""The verb `clipscale export`."""

from pathlib import Path

import torch

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.config.tools import ExportSettings, check_run
from clipscale.export import hugging_face, open_clip
from clipscale.export.card import card
from clipscale.models.trained import load_model

FORMATS = {"open_clip": (open_clip.write, "open_clip"), "hf": (hugging_face.write, "transformers")}
"""By the setting `to`: what writes the folder, and the library that loads it, by its name on Hugging Face."""


def main(settings: ExportSettings) -> Path:
    """Write the folder and return it.

    Raises UserError without a readable checkpoint, for a model that the format lacks, and if it cannot be written.
    """
    run = check_run(settings)
    model, config, step = load_model(run, settings.checkpoint, settings.weights)
    name = "export" if settings.to == "open_clip" else f"export-{settings.to}"
    out = Path(settings.out).expanduser() if settings.out else run / name
    write, library = FORMATS[settings.to]
    note = {"run": run.name, "step": str(step), "weights": settings.weights}
    try:
        out.mkdir(parents=True, exist_ok=True)
        call = write(model, config, out, getattr(torch, settings.dtype), note)
        here = call.format(out.name)  # the card goes where the folder goes: it names no path of this machine
        files.write_text(out / "README.md", card(run, model, config, note, here, library))
    except OSError as error:
        raise UserError(f"out={out}: cannot be written ({error.strerror or error}); choose another folder") from error
    say(f"{out}: step {step}; {call.format(out.resolve())}")
    return out
