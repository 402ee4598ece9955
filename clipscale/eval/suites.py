"""Suites of published sets: finds each set under `eval.root`, and sums the results up as the suite's source does."""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig
from clipscale.eval.sets import prompts
from clipscale.eval.sets.item import CLASSIFICATION, EvalSet
from clipscale.eval.sets.known import KnownSet, known_sets, published_classnames, published_templates, table
from clipscale.eval.sets.load import load_set, load_sets
from clipscale.report.table import TextTable

log = logging.getLogger(__name__)


def chosen_sets(config: EvalConfig) -> list[EvalSet]:
    """The sets of `eval.sets`, then those of `eval.suite`, with `eval.prompts` and up to `eval.limit`. Raises UserError."""
    sets = load_sets(config.sets)
    if config.suite != "none":
        sets += suite_sets(config.suite, config.root)
    twice = [name for name, count in Counter(item.name for item in sets).items() if count > 1]
    if twice:
        raise UserError(f"eval.sets: {twice[0]} is in suite={config.suite} too; leave it out of eval.sets")
    if config.prompts is not None:
        texts = prompts.chosen(config.prompts)
        sets = [_prompted(item, texts, config.prompts) for item in sets]
    return [item.limited(config.limit) for item in sets]


def suite_sets(suite: str, root: str | None) -> list[EvalSet]:
    """The sets of a suite that are in the folder `root`, under the suite's names for them. The others are named in the log.

    Raises UserError if there are none, and for a set that cannot be used.
    """
    if root is None:
        raise UserError(
            f"suite={suite} needs eval.root=DIR, the folder with its sets; docs/evaluation.md lists their names"
        )
    folder = Path(root).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"eval.root={root}: there is no such folder; give the folder with the sets of suite={suite}")
    entries = [known_sets()[name] for name in table()["suites"][suite]["sets"]]
    places = {known.name: place for known in entries if (place := known.find(folder))}
    if not places:
        raise UserError(
            f"eval.root={root} holds none of the {len(entries)} sets of suite={suite}; {entries[0].name} is looked for as "
            f"{', '.join(entries[0].candidates)} and comes from {entries[0].source}"
        )
    for known in entries:
        if known.name not in places:
            _warn(f"suite={suite}: {known.missing(folder)}")
    main = {name: (metric,) for name, metric in table()["suites"][suite].get("metrics", {}).items()}
    return [
        _known_set(known, places[known.name], folder, main.get(known.name)) for known in entries if known.name in places
    ]


def suite_table(
    config: EvalConfig, sets: Sequence[EvalSet], results: Mapping[str, Mapping[str, float]], name: str
) -> TextTable:
    """The columns of the suite for one model, in per cent: each the mean of some results, or `-` where one of them is missing."""
    suite = table()["suites"][config.suite]
    marks = ("ema",) if config.weights == "ema" else ()
    of_set = {item.name: results.get(item.label("", *marks), {}) for item in sets}
    cells = []
    for wanted in suite["columns"].values():
        entries = suite["sets"] if wanted == "all" else wanted
        values = [of_set.get(entry.partition(":")[0], {}).get(entry.partition(":")[2] or "main") for entry in entries]
        known = [value for value in values if value is not None]
        cells.append(f"{100 * sum(known) / len(known):.2f}" if len(known) == len(values) else "-")
    return TextTable([config.suite, *suite["columns"]], [[[name, *cells]]])


def _known_set(known: KnownSet, place: Path, root: Path, metric: tuple[str, ...] | None) -> EvalSet:
    """The set with its published class names and prompts, where its files have none."""
    item = load_set(place, tuple(published_classnames(known) or ()), known.group)
    metric = metric or known.main_metric(item)
    if item.kind == CLASSIFICATION and item.templates == [prompts.SINGLE] and not (place / prompts.TEMPLATES).is_file():
        item = replace(item, templates=published_templates(known))
    if known.inliers:
        inliers = _inliers(known_sets()[known.inliers], root, item.classnames)
        item = replace(item, inliers=inliers)
        if inliers is None and "aupr" in metric:
            _warn(f"{known.name}: its main metric needs {known_sets()[known.inliers].missing(root)}")
            metric = ()
    return replace(item, name=known.name, metric=metric)


def _inliers(known: KnownSet, root: Path, classnames: Sequence[str]) -> EvalSet | None:
    """The pictures of the named classes in another set under `root`."""
    place = known.find(root)
    if place is None:
        return None
    item, wanted = load_set(place), set(classnames)
    kept = [i for i, label in enumerate(item.labels) if item.classnames[label] in wanted]
    if not kept:
        raise UserError(f"eval.root: {place} has no picture of the {len(wanted)} classes; check its classnames.txt")
    return replace(item, images=[item.images[i] for i in kept], labels=[item.labels[i] for i in kept])


def _prompted(item: EvalSet, templates: list[str], name: str) -> EvalSet:
    """The set with other prompts. Unless they are its own, its figures have another name."""
    if item.kind != CLASSIFICATION or list(item.templates) == templates:
        return item
    return replace(item, templates=templates, marks=(*item.marks, f"prompts {Path(name).stem}"))


@cache
def _warn(line: str) -> None:
    """Once per process, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", line)
