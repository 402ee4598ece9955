"""The records of a folder of features: which weights computed them, and of which shard each file is."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.conditions import source_names
from clipscale.config.model import ModelConfig
from clipscale.config.secrets import text_without_secrets
from clipscale.config.setting import differences
from clipscale.data.addresses import basename, is_local, without_query
from clipscale.data.shards.features import FEATURES_FILE, TeacherNote, notes_beside, one_of_each_folder
from clipscale.data.shards.listing import list_shards
from clipscale.models.towers import ClipModel
from clipscale.tools.embed.arrays import SHARDS_FILE, FeaturesNote
from clipscale.tools.embed.settings import EmbedConfig

# A file in `out` that a command locks while it changes the records.
LOCK_FILE = ".embed.lock"
# The format of plain arrays. Any other format is the name of a teacher.
ARRAYS = "features"


def features_note(config: EmbedConfig, model: ClipModel, settings: ModelConfig) -> FeaturesNote:
    """The description of the features; see `FeaturesNote`."""
    note: FeaturesNote = {
        "model": settings.name,
        "weights": model.image.digest(),
        "width": model.embed_dim,
        "dtype": config.dtype,
        "image_size": model.image_size,
        "mean": list(model.pixels.mean),
        "std": list(model.pixels.std),
        "resize": model.pixels.resize_mode,
        "interpolation": model.pixels.interpolation,
        "text": model.text.digest(),
        "captions": source_names(config.data.captions),
    }
    if config.teacher:
        note["scale"] = model.logit_scale.exp().item()
    return note


def write_note(config: EmbedConfig, out: Path, note: FeaturesNote) -> dict[str, str]:
    """Write the note, and of which shard each file will be. Returns the shards by the names of their files in `out`.

    Other commands may write into `out` meanwhile: the records are read and written at the end, in one go.

    Raises UserError where two shards have one name, or where `out` has features of another kind or from elsewhere.
    """
    shards = shards_by_name(config, out)
    others = other_teachers(config, shards.values()) if config.teacher else {}
    format_name = config.teacher or ARRAYS
    with locked(out):
        entries = read_record(out / SHARDS_FILE)
        for name, url in shards.items():
            check_source(out, name, str(entries.setdefault(name, {"source": plain_address(url)}).get("source")), url)
        notes = read_record(out / FEATURES_FILE)
        if notes:
            for name, (before, now) in differences(notes.pop(format_name, {}), note).items():
                difference = f"{name}: {str(before)[:80]}, not {str(now)[:80]}"
                raise UserError(f"out={out}: holds features of another kind ({difference}); choose another folder")
            # files of an earlier command have no features of other teachers than it noted
            others = common_notes(others, notes, f"out={out}: {out}", "these shards")
        files.write_json(out / FEATURES_FILE, {**others, format_name: note})
        write_shards_file(out, entries)  # before any work: a start after a kill then knows whose files are there
    return shards


def shards_by_name(config: EmbedConfig, out: Path) -> dict[str, str]:
    """The shards, by the names of their files in `out`. Raises UserError where two have one name."""
    shards: dict[str, str] = {}
    for url in list_shards(config.data)[0]:
        name = basename(url).partition(".tar")[0] + (".tar" if config.teacher else ".jsonl")
        check_source(out, name, plain_address(shards.setdefault(name, url)), url)
        if is_local(url) and Path(url).expanduser().parent.resolve() == out.resolve():
            raise UserError(f"out={out}: data.train has shards there; choose another folder")
    return shards


def check_source(out: Path, name: str, source: str, url: str) -> None:
    """Raise UserError if the file `name` is of another shard than the one at `url`."""
    if source != plain_address(url):
        raise UserError(
            f"out={out}: {name} is of {source} and of {plain_address(url)}; choose an out=DIR for each source"
        )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder, and change its records while no other command does."""
    out.mkdir(parents=True, exist_ok=True)
    with files.locked(out / LOCK_FILE):
        yield


def other_teachers(config: EmbedConfig, shards: Iterable[str]) -> dict[str, TeacherNote]:
    """The notes of the other teachers whose features all folders of the shards have.

    Raises UserError where two notes of a teacher differ: one folder cannot say both.
    """
    first, *rest = one_of_each_folder(shards)
    common = notes_beside(first)
    common.pop(config.teacher, None)
    for url in rest:
        common = common_notes(common, notes_beside(url), f"out={config.out}: {url}", first)
    return common


def common_notes(
    notes: Mapping[str, TeacherNote], others: Mapping[str, object], place: str, first: str
) -> dict[str, TeacherNote]:
    """The notes of teachers that both have. Raises UserError where two of a teacher differ.

    `place` and `first` name in its message where `others` and `notes` are from.
    """
    for name in notes.keys() & others.keys():
        if notes[name] != others[name]:
            raise UserError(f"{place} has features of another {name} than {first}; choose an out=DIR for each")
    return {name: note for name, note in notes.items() if name in others}


def add_entries(out: Path, entries: Mapping[str, Mapping[str, object]]) -> None:
    """Put these entries into SHARDS_FILE, beside those of other commands."""
    with locked(out):
        write_shards_file(out, {**read_record(out / SHARDS_FILE), **entries})


def write_shards_file(out: Path, entries: Mapping[str, Mapping[str, object]]) -> None:
    files.write_json(out / SHARDS_FILE, dict(sorted(entries.items())))


def read_record(path: Path) -> dict[str, dict[str, object]]:
    """The entries of a file in `out`, by name; none if it is not there. Raises UserError."""
    with files.damage_to_user_error("out", path, "remove this file and start again; the arrays stay"):
        content = files.read_json(path) if path.is_file() else {}
        return {name: dict(entry) for name, entry in content.items()}


def plain_address(url: str) -> str:
    """A shard's address without secrets."""
    return text_without_secrets(str(Path(url).expanduser().absolute()) if is_local(url) else without_query(url))
