"""Checks the results that settings name, such as `checkpoint.best`: each is one that the evaluation has."""

from collections.abc import Mapping, Sequence

from clipscale.common.errors import UserError
from clipscale.common.goal import Goal
from clipscale.eval.run import sized_sets
from clipscale.eval.sets.item import EvalSet


def check_goals(goals: Mapping[str, str], sets: Sequence[EvalSet], sizes: Sequence[int]) -> None:
    """Raise UserError for a SET/METRIC that the evaluation of these sets does not have. `goals`: by setting, "": none.

    `sizes`: the first numbers of the features, by which the sets are evaluated beside the whole features.
    """
    labels = [[each.label for each in sized_sets(one, sizes)] for one in sets]
    for key, goal in goals.items():
        if goal:
            check_goal(key, goal, [whole for whole, *_ in labels], [label for _, *sized in labels for label in sized])


def check_goal(key: str, goal: str, labels: list[str], sized: list[str] | None = None) -> None:
    """Raise UserError for a SET/METRIC that means none or several of the evaluated `labels`. `key`: the setting's.

    `sized`: the names of results by the first numbers of the features. They count only if no set itself has such a
    name.
    """
    parsed = Goal.parse(key, goal)
    found = parsed.possible_sets(labels) or parsed.possible_sets(sized or [])
    if len(found) != 1:
        what = "several such sets are" if found else "no such set is"
        names = ", ".join(found or [*labels, *(sized or [])])
        raise UserError(f"{key}={goal}: {what} evaluated; give SET/METRIC of {names}")
