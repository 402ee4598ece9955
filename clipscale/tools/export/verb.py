"""The verb `clipscale export`, and the model card: how the model was trained and how well it scores."""

import zlib
from pathlib import Path

from jinja2 import Template
from open_clip.tokenizer import HFTokenizer
from safetensors import SafetensorError, safe_open

from clipscale import __version__
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line
from clipscale.config.model import ModelConfig
from clipscale.config.sections import WEIGHTS
from clipscale.config.setting import flatten
from clipscale.data.hashing import utf8
from clipscale.log.table import result_tables, with_start
from clipscale.models.towers import ClipModel
from clipscale.run_folder.paths import existing_run
from clipscale.run_folder.records import read_evaluations, settings_of_run
from clipscale.tools.export import hugging_face, open_clip
from clipscale.tools.export.average import average
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.trained_model import load_model

# Settings of the run in the card, as far as they are set.
CARD_SETTINGS = (
    "batch", "samples", "epochs", "loss.objective", "loss.sizes", "optim.name", "optim.lr", "schedule.name",
    "schedule.warmup", "precision", "seed",
)  # fmt: skip
# The file of weights, by format. It notes the run.
FILES = {"open_clip": open_clip.WEIGHTS_FILE, "hf": hugging_face.WEIGHTS_FILE}
START_WEIGHTS = ("model.weights", "model.image.weights", "model.text.weights")


def main(settings: ExportSettings) -> Path:
    """Write the folder and return it.

    Raises UserError without a checkpoint, and for a model that open_clip would build otherwise.
    """
    run = existing_run(settings.run)
    model, config, step = load_model(run, settings.which, settings.weights)
    name = "export"
    origin = settings.weights
    if settings.average:
        shares = average(model, config, settings.average, settings.shares, settings.weights)
        names = [run.name, *map(name_of_start, settings.average)]
        parts = [f"{share:g} {source}" for share, source in zip(shares, names, strict=True)]
        name += "-average"
        origin = f"{' + '.join(parts)} ({settings.weights})"
    if settings.format == "hf":
        name += "-hf"
    out = Path(settings.out).expanduser() if settings.out else run / name
    check_folder(out, run, settings.format)
    note = {"run": utf8(run.name), "step": str(step), "weights": utf8(origin)}
    write = hugging_face.write if settings.format == "hf" else open_clip.write
    try:
        call = write(model, config, out, note)
        if isinstance(model.tokenizer.inner, HFTokenizer):
            model.tokenizer.inner.save_pretrained(str(out))
        # The card goes where the folder goes: it names no path of this machine.
        write_card(out / "README.md", model_card(run, model, config, note, call.format(out.name)))
    except (OSError, SafetensorError) as error:
        reason = files.reason_of(error)
        raise UserError(f"out={out}: cannot be written ({reason}); make room, or choose another out=FOLDER") from error
    print_line(f"{out}: step {step}; {call.format(out.resolve())}")
    return out


def check_folder(out: Path, run_dir: Path, format: str) -> None:
    """Raise UserError for a folder with anything but an earlier export of this run in this format."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    if noted_run(out / FILES["open_clip" if format == "hf" else "hf"]):  # one card for two models
        raise UserError(f"out={out}: the folder has an export of the other format; choose another out=FOLDER")
    noted = noted_run(out / FILES[format])
    if noted is None:
        raise UserError(f"out={out}: the folder has files of other origin; choose another out=FOLDER, or remove it")
    if noted != utf8(run_dir.name):
        raise UserError(f"out={out}: the folder has an export of another run; choose another out=FOLDER, or remove it")


def noted_run(path: Path) -> str | None:
    """The name of the run that was exported to this file; None for a file that is not an export."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("run")
    except (OSError, SafetensorError):
        return None


def write_card(path: Path, text: str) -> None:
    """Write the card, unless one is there that is not as an export has left it."""
    card = text.encode("utf-8", "backslashreplace")  # names of runs may hold bytes that are not UTF-8
    if path.is_file() and not is_unedited(path.read_bytes()):
        print_line(f"{path}: has been edited, and is kept as it is; remove it for a new one")
        return
    with files.replacing(path) as file:
        file.write(card + export_mark(card))


def is_unedited(card: bytes) -> bool:
    start = card.rfind(b"\n", 0, -1) + 1
    return card[start:] == export_mark(card[:start])


def export_mark(card: bytes) -> bytes:
    """The last line of a card, with the CRC-32 of what is above."""
    return b"<!-- The next export replaces this text unless it has been edited: %08x -->\n" % zlib.crc32(card)


def model_card(run_dir: Path, model: ClipModel, config: ModelConfig, note: dict[str, str], call: str) -> str:
    """The text of README.md. `call` loads the folder; `note` has the run, its step and which weights."""
    settings = dict(flatten(settings_of_run(run_dir)))
    results_by_step = {str(record["step"]): record["results"] for record in read_evaluations(run_dir)}
    was_evaluated = note["weights"] in WEIGHTS  # an average of weights was not evaluated
    results = with_start(results_by_step.get(note["step"], {}) if was_evaluated else {}, results_by_step.get("0", {}))
    scores = [result_tables(results)] if results else []
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, keep_trailing_newline=True)
    return template.render(
        model=model,
        config=config,
        note=note,
        settings=settings,
        scores=scores,
        shown=CARD_SETTINGS,
        starts=[name_of_start(str(settings[name])) for name in START_WEIGHTS if settings.get(name)],
        call=call,
        library="transformers" if "transformers" in call else "open_clip",
        version=__version__,
    )


def name_of_start(weights: str) -> str:
    """The name of the weights that a run began from, without the path of this machine."""
    path = Path(weights.removeprefix("run:"))
    if weights.startswith("hf-hub:"):
        return weights
    return f"{path.parent.parent.name}, {path.name}" if path.parent.name == "checkpoints" else path.name
