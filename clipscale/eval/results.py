"""Result files: what was measured, on which weights and with which prompts.

RUN/eval/step_N.json has `results` (set -> metric -> value) and `measured` (set -> what the figures belong to).
"""

import hashlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import open_clip
import torch

from clipscale import __version__
from clipscale.common import files
from clipscale.config.redact import redacted
from clipscale.eval.examples import Examples
from clipscale.eval.sets.item import EvalSet
from clipscale.report.evaluations import read_evaluation

log = logging.getLogger(__name__)

Results = dict[str, dict[str, float]]
"""Set name -> metric name -> value. Metrics are shares in [0, 1], except the counts `images`, `captions`, `questions`
and `broken`, and ranks. `main` is the set's main metric in its suite."""

CIRCUMSTANCES = {"time", "seconds", "checkpoint"}
"""Entries of `measured` that the figures do not depend on."""


def measured(item: EvalSet, about: dict[str, Any]) -> dict[str, Any]:
    """What the figures of a set belong to: the set, how much of it, the prompts, the versions, and what the caller knows."""
    found: dict[str, Any] = {"path": str(item.path), "kind": item.kind, "images": len(item)}
    found["limit"] = item.size if item.whole is not None else None
    if item.whole is not None:
        found |= {"of": item.whole, "chosen": "of each class in proportion"}
    if item.templates:
        names = hashlib.blake2b("\n".join(item.classnames).encode("utf-8", "replace"), digest_size=16).hexdigest()
        found |= {"prompts": list(item.templates), "classes": len(item.classnames), "classnames": names}
    if item.inliers is not None:
        found["inliers"] = str(item.inliers.path)
    if item.metric:
        found["main"] = list(item.metric)
    if item.train is not None:
        found["probe"] = {"path": str(item.train.path), "images": len(item.train), "shots": item.shots}
    versions = {"clipscale": __version__, "torch": str(torch.__version__), "open_clip": open_clip.__version__}
    return found | about | {"versions": versions, "time": datetime.now(UTC).isoformat(timespec="seconds")}


class StoredResults:
    """The figures of an evaluation in RUN/eval, written set by set: an evaluation that is stopped keeps those it has.

    about: what the caller knows of all figures. keep_newer: pictures of a later step stay in place of this one's.
    """

    def __init__(
        self, run_dir: Path, step: int | None, sets: Sequence[EvalSet], about: dict[str, Any], keep_newer: bool = False
    ) -> None:
        self.run_dir, self.step, self.keep_newer = run_dir, step, keep_newer
        self.measured = {item.label(part): measured(item, about) for item in sets for part in item.parts}

    def known(self) -> Results:
        """The figures that are in the step's file already, for the same weights, prompts, precision and versions."""
        record = _earlier(_file(self.run_dir, self.step))
        stored, results = record.get("measured", {}), record.get("results", {})

        def facts(entry: Any) -> Any:
            """An entry of `measured` without times and the name of the checkpoint."""
            return isinstance(entry, dict) and {k: v for k, v in entry.items() if k not in CIRCUMSTANCES}

        now = {name: facts(redacted(entry)) for name, entry in self.measured.items() if name in results}
        return {name: results[name] for name, entry in now.items() if facts(stored.get(name)) == entry}

    def save(self, results: Results, seconds: float, pictures: Examples | None) -> None:
        """Write the figures of a set, each file as a whole. Warns where that fails, as on a full disk: a run goes on."""
        about = {label: self.measured[label] for label in results}
        try:
            save_results(self.run_dir, self.step, results, seconds=seconds, about=about)
            if pictures and not (self.keep_newer and self._later(pictures.file(self.run_dir))):
                pictures.save(self.run_dir)
        except OSError as error:
            log.warning("%s/eval could not be written (%s): %s", self.run_dir, error.strerror, results)

    def _later(self, file: Path) -> bool:
        """Whether a file of pictures is of a later step. A damaged one is not."""
        try:
            stored = files.read_tree(file).get("step")
        except (OSError, ValueError):
            return False
        return self.step is not None and isinstance(stored, int) and stored > self.step


def _file(run_dir: Path, step: int | None) -> Path:
    return files.inner_folder(run_dir, "eval") / ("final.json" if step is None else f"step_{step:08d}.json")


def save_results(
    run_dir: Path, step: int | None, results: Results, *, seconds: float, about: dict[str, Any] | None = None
) -> Path:
    """Write `eval/step_N.json`, or `eval/final.json`, as a whole. Results of other sets from an earlier call stay in the file.

    An earlier file that cannot be read is renamed. Raises OSError.
    """
    path = _file(run_dir, step)
    earlier = _earlier(path)
    now = {name: entry | {"seconds": round(seconds, 3)} for name, entry in (about or {}).items()}
    found = {"results": earlier.get("results", {}) | results, "measured": earlier.get("measured", {}) | now}
    files.write_json(path, redacted({"step": step} | found))
    return path


def _earlier(path: Path) -> dict[str, Any]:
    """The content of an earlier file; nothing if there is none, or if it is damaged."""
    if not path.exists():
        return {}
    try:
        return read_evaluation(path)
    except ValueError as error:
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        log.warning("%s cannot be read (%s); it is now %s", path, error, aside.name)
        return {}
