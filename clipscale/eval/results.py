"""Result files: what was measured, of which model and with which prompts.

RUN/eval/step_N.json has `results` (set -> metric -> value) and `measured` (set -> what the results belong to).
"""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import open_clip
import torch

from clipscale import __version__
from clipscale.common import files
from clipscale.eval.sets.item import EvalSet

Results = dict[str, dict[str, float]]
"""Set name -> metric name -> value. Metrics are shares in [0, 1], except the counts `images`, `captions` and `broken`.
`main` is the set's main metric in its suite."""


def measured(eval_set: EvalSet, about: dict[str, Any]) -> dict[str, Any]:
    """What the results of a set belong to: how much of the set, its prompts, the versions, and what the caller knows."""
    facts: dict[str, Any] = {"path": str(eval_set.path), "kind": eval_set.kind, "images": len(eval_set)}
    if eval_set.whole is not None:
        facts |= {"of": eval_set.whole, "chosen": "of each class in proportion"}
    if eval_set.templates:
        digest = hashlib.blake2b("\n".join(eval_set.classnames).encode(), digest_size=16).hexdigest()
        facts |= {"prompts": list(eval_set.templates), "classes": len(eval_set.classnames), "classnames": digest}
    if eval_set.metric:
        facts["main"] = list(eval_set.metric)
    versions = {"clipscale": __version__, "torch": str(torch.__version__), "open_clip": open_clip.__version__}
    return facts | about | {"versions": versions, "time": datetime.now(UTC).isoformat(timespec="seconds")}


def save_results(run_dir: Path, step: int | None, results: Results, about: dict[str, dict[str, Any]]) -> Path:
    """Write `eval/step_N.json`, or `eval/final.json`, where the results of other sets stay. Raises OSError.

    about: what each set's results belong to.
    """
    path = run_dir / "eval" / ("final.json" if step is None else f"step_{step:08d}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier: dict[str, Any] = {}
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
    record = {"results": earlier.get("results", {}) | results, "measured": earlier.get("measured", {}) | about}
    files.write_json(path, {"step": step} | record)
    return path
