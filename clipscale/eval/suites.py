"""Suites of published sets: finds each set under `eval.root`, and averages the results as the suite's source does."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from clipscale.common import ranks
from clipscale.common.errors import UserError
from clipscale.common.record import Results
from clipscale.config.sections import SUITES, EvalConfig
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.set_paths import check_set_paths
from clipscale.eval.sets import prompts
from clipscale.eval.sets.item import EvalSet
from clipscale.eval.sets.known import KnownSet, known_sets
from clipscale.eval.sets.load import load_set, load_sets
from clipscale.log.table import TextTable

log = logging.getLogger(__name__)


def load_chosen_sets(config: EvalConfig) -> list[EvalSet]:
    """The sets of `eval.sets`, then of `eval.suite`, up to `eval.limit`. Raises UserError.

    Their results are marked with the limit, and with `ema` where the averaged weights are evaluated.
    """
    check_set_paths(config)
    sets = load_sets(config.sets)
    if config.suite != "none":
        assert config.root is not None  # `check_set_paths` refuses a suite without it
        sets += suite_sets(config.suite, config.root)
    names = [eval_set.name for eval_set in sets]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"eval.sets: two sets, with those of eval.suite={config.suite}, are called {name}; leave one out, or "
                "rename its folder"
            )
    marks = ("ema",) if config.weights == "ema" else ()
    return [replace(eval_set, marks=marks).limited(config.limit) for eval_set in sets]


@cache
def suite_sets(suite: str, root: str) -> list[EvalSet]:
    """The sets of a suite in the folder `root`, under the suite's names. The log names the sets that are missing.

    Raises UserError if there are none, and for a set that cannot be used.
    """
    entries = [known_sets()[name] for name in SUITES[suite]["sets"]]
    folders = [entry.find(Path(root).expanduser().absolute()) for entry in entries]
    sets = [_known_set(entry, folder) for entry, folder in zip(entries, folders) if folder]
    if not sets:
        raise UserError(
            f"eval.root={root} holds none of the {len(entries)} sets of eval.suite={suite}; {entries[0].name} is "
            f"looked for as {', '.join(entries[0].candidates)} and comes from {entries[0].source}"
        )
    for entry, folder in zip(entries, folders):
        if folder is None and ranks.rank() == 0:
            log.warning(
                f"eval.suite={suite}: {entry.name} is missing in {root} (as {', '.join(entry.candidates)}); it comes "
                f"from {entry.source}"
            )
    return sets


def suite_table(suite: str, sets: Sequence[EvalSet], results: Results, name: str) -> TextTable:
    """The columns of the suite for one model, in per cent: means of results, or `-` where one of them is missing."""
    results_by_set = {eval_set.name: results.get(eval_set.label, {}) for eval_set in sets}
    columns = SUITES[suite]["columns"]
    cells = []
    for column in columns.values():
        values = []
        for entry in SUITES[suite]["sets"] if column == "all" else column:
            set_name, _, metric = entry.partition(":")
            values.append(results_by_set.get(set_name, {}).get(metric or "main", math.nan))
        mean = sum(values) / len(values)
        cells.append("-" if math.isnan(mean) else f"{100 * mean:.2f}")
    return TextTable([suite, *columns], [[name, *cells]])


def _known_set(entry: KnownSet, folder: Path) -> EvalSet:
    """The set under its published name. Raises UserError for class folders without the published prompts."""
    eval_set = load_set(folder)
    file = folder / prompts.TEMPLATES
    single = isinstance(eval_set, ClassificationSet) and eval_set.templates == [prompts.SINGLE]
    if single and not file.is_file():
        raise UserError(
            f"eval.root: {folder} brings no prompts; take the webdataset of {entry.name}, which has the published ones "
            f"({entry.source}), or write them into {file}"
        )
    main_metrics = (entry.metric,) if entry.metric else eval_set.default_main_metrics
    return replace(eval_set, name=entry.name, main_metrics=main_metrics)
