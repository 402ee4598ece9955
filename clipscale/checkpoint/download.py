"""Downloads a run's checkpoints and records from its copy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.implementations.dirfs import DirFileSystem

from clipscale.checkpoint.copy_store import LOCAL, complete_checkpoints, copy_records, open_store
from clipscale.checkpoint.loading import verify
from clipscale.common.errors import UserError, one_line, to_user_error
from clipscale.common.goal import Goal
from clipscale.common.remote import NO_CREDENTIALS, no_credentials
from clipscale.common.terminal import log_line, log_warning
from clipscale.run_folder.chosen_checkpoint import BestFinder
from clipscale.run_folder.disk import TEMPORARY, discard
from clipscale.run_folder.paths import METRICS, checkpoints_of, step_of
from clipscale.run_folder.records import settings_of_run
from clipscale.run_folder.set_aside import set_aside_records

# Beginning and end of messages about a store.
UNREADABLE = "checkpoint.copy={} cannot be read"
WITHOUT_COPY = "; checkpoint.copy= continues without it"


def accessible_checkpoints(store: DirFileSystem, run_dir: Path, address: str) -> list[Path]:
    """`complete_checkpoints`, but a store that needs credentials also raises UserError. `address`: for the message."""
    try:
        return complete_checkpoints(store, run_dir)
    except Exception as error:
        if type(error).__name__ in NO_CREDENTIALS:
            raise no_credentials(f"checkpoint.copy={address}", error) from error
        raise


def check_copy(run_dir: Path, address: str) -> None:
    """Raise UserError if the store cannot be read, or holds another run's copy or other files."""
    with to_user_error(UNREADABLE.format(address), WITHOUT_COPY):
        accessible_checkpoints(open_store(address), run_dir, address)


def download_newer(run_dir: Path, address: str, resume: str, local: Path | None = None) -> bool:
    """Download the copy's newest complete checkpoint, with its records, if it is of a later step than `local`.

    Returns whether it downloaded a checkpoint. If not, and the run's folder has no records, it downloads the records
    alone. With `resume=auto` it also downloads the best checkpoint, if the folder has not got it.

    `resume`: the setting; only `auto` downloads. `local`: the checkpoint from which the run would go on without the
    copy; with `resume=PATH` it may be another run's. With it, a copy that cannot be read is a warning, not an error.

    Raises UserError.
    """
    unreadable = UNREADABLE.format(address)
    with to_user_error(unreadable, WITHOUT_COPY):
        store = open_store(address)
        try:
            in_store = accessible_checkpoints(store, run_dir, address)
        except Exception as error:
            if not local or isinstance(error, UserError):
                raise
            log_warning(f"{unreadable} ({one_line(error)}); the run continues from {local.name}")
            return False
        newer = [path for path in in_store if not local or step_of(path) > step_of(local)]
        if newer and resume != "auto":
            raise UserError(
                f"resume={resume}: checkpoint.copy holds {newer[-1].name}, which is later; give another address, or "
                "resume=auto to resume from it"
            )
        is_downloaded = download_newest(store, newer, run_dir, address, has_local=local is not None)
        if resume == "auto":
            if not is_downloaded and not (run_dir / METRICS).exists():  # the start will drop lines of later steps
                copy_records(store, DirFileSystem(str(run_dir), LOCAL))
            download_best(store, in_store, run_dir)  # at every start: an earlier one may have been killed before this
    return is_downloaded


def download_newest(store: DirFileSystem, newer: list[Path], run_dir: Path, address: str, *, has_local: bool) -> bool:
    """Download the last of the checkpoints that is not damaged, with its records. Returns whether there was one.

    `has_local`: whether the run can go on from a checkpoint on this machine. If not, and all of these are damaged,
    raises UserError.
    """
    for path in reversed(newer):
        try:
            download(store, path, run_dir)
            return True
        except UserError as error:
            if path is newer[0] and not has_local:
                raise UserError(
                    f"checkpoint.copy={address} holds no intact checkpoint ({error}); give another address"
                ) from error
            log_warning(f"checkpoint.copy: {error}")
    return False


def download(store: DirFileSystem, path: Path, run_dir: Path) -> None:
    """Download a checkpoint and the records. Raises UserError, and changes nothing, if it is damaged."""
    with downloaded(store, path, run_dir) as temporary:
        log_line(f"{path.name} is restored from checkpoint.copy: the run's folder has no intact checkpoint that recent")
        set_aside_records(run_dir, "continues from its copy")
        copy_records(store, DirFileSystem(str(run_dir), LOCAL))
        discard(run_dir / path)
        temporary.replace(run_dir / path)


def download_best(store: DirFileSystem, in_store: list[Path], run_dir: Path) -> None:
    """Download the run's best checkpoint, if its folder has not got it. If that fails, prints a warning."""
    name = "the best checkpoint"
    try:
        goal = settings_of_run(run_dir).get("checkpoint", {}).get("best", "")
        own = checkpoints_of(run_dir)
        earlier = [path for path in in_store if own and step_of(path) <= step_of(own[-1])]
        best = None
        if goal:
            finder = BestFinder(run_dir, Goal.parse("checkpoint.best", goal))
            best = finder.best_step(map(step_of, [*own, *earlier]))
        for path in earlier:
            if step_of(path) == best and not (run_dir / path).exists():
                name = f"the best checkpoint, {path.name},"
                with downloaded(store, path, run_dir) as temporary:
                    temporary.replace(run_dir / path)
                log_line(f"{path.name}, the best by checkpoint.best={goal}, is restored from checkpoint.copy, too")
    except Exception as error:  # each library behind fsspec raises exceptions of its own
        log_warning(f"checkpoint.copy: {name} could not be fetched and remains only there ({one_line(error)})")


@contextmanager
def downloaded(store: DirFileSystem, path: Path, run_dir: Path) -> Iterator[Path]:
    """Context of a checkpoint of the store, downloaded to a temporary folder. Raises UserError if it is damaged."""
    temporary = (run_dir / path).with_suffix(TEMPORARY)
    names = store.ls(str(path), detail=False)
    try:
        store.get(names, [str(temporary / Path(name).name) for name in names])
        verify(temporary)
        yield temporary
    finally:
        discard(temporary)
