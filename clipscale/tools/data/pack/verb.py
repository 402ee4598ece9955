"""The verb `clipscale data pack`: makes shards of pictures and captions that lie in files, tables or folders.

The source is only read.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line
from clipscale.config.setting import differences
from clipscale.eval.sets.known import HELD_OUT
from clipscale.tools.data.pack.pairs import pairs_of, pictures_beside, removing_named_pictures, tables_of
from clipscale.tools.data.pack.parts import PARTS, pack_parts
from clipscale.tools.data.pack.places import resolved_root
from clipscale.tools.data.pack.report import report
from clipscale.tools.data.settings import PackSettings

# Names of folders that hold a set's splits, which are kept apart.
SPLITS = {"train", *HELD_OUT}


def main(words: Sequence[str], settings: PackSettings) -> int:
    """Pack the source; print what was packed and what was left out. Raises UserError."""
    if len(words) != 1:
        raise UserError("give one source, as in: clipscale data pack captions.csv out=/data/mine")
    if not settings.out:
        raise UserError("out is not set; give the folder of the shards, out=DIR")
    path = Path(words[0]).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{words[0]}: there is no such file or folder")
    with files.damage_to_user_error("table", path, "repair it, or fetch it again"):
        tables = tables_of(path, settings.columns, settings.holdout.by)
    splits = [folder.name for folder in files.folders(path) if folder.name in SPLITS] if path.is_dir() else []
    if len(splits) > 1:
        print_line(f"{', '.join(splits)} become one set; pack each of them by itself to keep them apart")
    if tables:
        print_line(f"columns: {', '.join(tables[0].columns)}")
    for remark in dict.fromkeys(remark for table in tables for remark in table.remarks):
        print_line(remark)
    root = resolved_root(settings.root) if settings.root else ""
    columns = [table.columns for table in tables]
    is_new = not Path(settings.out).expanduser().exists()
    out = prepare_folder(path, settings.out, asdict(settings) | {"root": root, "columns": columns})
    try:
        without_row = pictures_beside(path, tables)
        pairs = removing_named_pictures(pairs_of(path, tables, root, settings.splits), without_row)
        notes = pack_parts(pairs, settings, out)
        pictures = "files" if path.is_dir() else "images"
        report(path, out, notes, "rows" if tables else pictures, sorted(without_row))
    except UserError:
        remove_empty(out, is_new=is_new)
        raise
    if settings.holdout.fraction and not any(note["held-out pairs"] for note in notes):
        together = f"equal {settings.holdout.by}" if settings.holdout.by else "the same picture"
        print_line(
            f"warning: holdout={settings.holdout.share}: no pair is held out; pairs with {together} stay together, "
            "and the share is met by chance: give a larger one, and a new out=",
            error=True,
        )
    return 0


def prepare_folder(source: Path, folder: str, settings: Mapping[str, object]) -> Path:
    """The folder of the shards: a new one, or one that the same command began. Raises UserError."""
    out = Path(folder).expanduser()
    note = out / "pack.json"
    with files.damage_to_user_error("out", out, "choose another folder"):
        out.mkdir(parents=True, exist_ok=True)  # before the source is listed, in which it may lie
        begun = {**settings, "out": "", "source": str(source), "changed": source.stat().st_mtime}
        if note.is_file():
            empty = not any(out.rglob("*.tar"))
            changes = differences(files.read_json(note), begun)
            if changes and not empty:
                others = ", ".join("the source's date" if name == "changed" else name for name in changes)
                raise UserError(
                    f"out={out}: was packed of another source, or with other settings ({others}); choose a new folder"
                )
            if empty:
                for note_of_part in out.glob("parts/*.json"):  # the files of the source may be others now
                    note_of_part.unlink()
        elif any(out.iterdir()):
            raise UserError(f"out={out}: exists and was not written by this command; choose a new folder")
        for name in ("parts", *PARTS.values()):
            (out / name).mkdir(parents=True, exist_ok=True)
        for unfinished in out.rglob(".*.tmp"):  # left by a killed command
            unfinished.unlink()
        files.write_json(note, begun)
    return out


def remove_empty(out: Path, *, is_new: bool) -> None:
    """Remove the empty folders of a refused command, and its note if no part has one. `is_new`: it has made `out`."""
    folders = [out / name for name in ("parts", *PARTS.values()) if name]
    for folder in folders:
        with suppress(OSError):  # the folder has other files
            folder.rmdir()
    if not any(folder.exists() for folder in folders):
        if not any(out.rglob("*.tar")):
            (out / "pack.json").unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                out.rmdir()
