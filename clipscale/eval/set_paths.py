"""Checks that the evaluation sets in the settings exist. Needs no torch."""

from collections.abc import Iterable
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig


def check_set_paths(config: EvalConfig, rendered: Iterable[str] = ()) -> None:
    """Raise UserError for sets that do not exist, except those in `rendered`, which the start makes."""
    for path in sorted(set(config.sets).difference(rendered)):
        if not Path(path).expanduser().exists():
            raise UserError(f"eval.sets: {path} does not exist; give the folder of a set, or a caption file")
    if config.suite != "none" and config.root is None:
        raise UserError(f"eval.suite={config.suite} needs eval.root=DIR, the folder with its sets")
    if config.root is not None and not Path(config.root).expanduser().is_dir():
        raise UserError(f"eval.root={config.root}: there is no such folder; give the one with the sets")
