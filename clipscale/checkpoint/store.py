"""Copies of a run's checkpoints at an address of fsspec (`checkpoint.store=s3://bucket/runs`), for machines without shared storage."""

import logging
from pathlib import Path

import fsspec

from clipscale.checkpoint import folder
from clipscale.checkpoint.loading import META, verify
from clipscale.common.errors import UserError, first_line

log = logging.getLogger(__name__)


class Store:
    """The folder ADDRESS/NAME of a run called NAME. A copy without its meta.json, which is sent last, is not complete."""

    def __init__(self, address: str, run: Path) -> None:
        """Raises UserError for an address that cannot be used."""
        self.run, self.address = run, address
        try:
            self._fs, root = fsspec.url_to_fs(address)
            self._root = f"{root.rstrip('/')}/{run.name}"
            self.steps()
        except Exception as error:  # each file system has errors of its own
            raise UserError(f"checkpoint.store={address}: it cannot be used ({first_line(error)})") from error

    def steps(self) -> list[int]:
        """The steps of the complete copies, oldest first."""
        self._fs.invalidate_cache()
        copies = [Path(file).parent for file in self._fs.glob(f"{self._root}/step_*/{META}")]
        return sorted(folder.step_of(copy) for copy in copies)

    def send(self, path: Path, keep: int, keep_every: int) -> None:
        """Copy a complete checkpoint there, and delete outdated copies. A failure is reported."""
        try:
            to = f"{self._root}/{path.name}"
            if self._fs.exists(to):  # half a copy, or one of a run that was taken back
                self._fs.rm(to, recursive=True)
            self._fs.makedirs(to, exist_ok=True)
            for file in sorted(path.iterdir(), key=lambda file: file.name == META):
                self._fs.put_file(str(file), f"{to}/{file.name}")
            for step in folder.outdated(self.steps(), folder.step_of(path), keep, keep_every):
                self._fs.rm(f"{self._root}/{folder.path_of(self.run, step).name}", recursive=True)
        except Exception as error:
            log.warning("checkpoint.store=%s: %s was not sent (%s)", self.address, path.name, first_line(error))

    def fetch(self) -> None:
        """Copy the newest whole checkpoint here if it is newer than those in the run's folder. Raises UserError."""
        newest = folder.newest_step(self.run)
        for step in reversed(self.steps()):
            if newest is not None and step <= newest:
                return
            path = folder.path_of(self.run, step)
            temporary = path.with_name(path.name + folder.TEMPORARY)
            try:
                self._fs.get(f"{self._root}/{path.name}/", f"{temporary}/", recursive=True)
                verify(temporary)
            except UserError:
                log.warning("checkpoint.store=%s: %s is damaged there", self.address, path.name)
                folder.discard(temporary)
                continue
            except Exception as error:
                raise UserError(
                    f"checkpoint.store={self.address}: {path.name} cannot be fetched ({first_line(error)})"
                ) from error
            temporary.replace(path)
            log.warning("%s was fetched from checkpoint.store=%s", path.name, self.address)
            return
