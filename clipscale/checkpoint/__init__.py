"""Checkpoints of a run: sharded, written in the background, and verified before they are used."""

from clipscale.checkpoint.folder import (
    checkpoints_of,
    locate,
    make_folder,
    path_of,
    remove_temporary,
    set_aside,
    step_of,
)
from clipscale.checkpoint.loading import load, read_values, verify
from clipscale.checkpoint.resume import check_fits, to_resume
from clipscale.checkpoint.saving import Saver, UnwritableError

__all__ = [
    "Saver", "UnwritableError", "check_fits", "checkpoints_of", "load", "locate", "make_folder", "path_of",
    "read_values", "remove_temporary", "set_aside", "step_of", "to_resume", "verify",
]  # fmt: skip
