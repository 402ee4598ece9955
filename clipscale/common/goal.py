"""A metric on an evaluation set, `SET/METRIC`, by which checkpoints or runs are compared."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from clipscale.common.errors import UserError

# Metrics that are better if they are lower.
LOWER_IS_BETTER = ("loss", "caption_loss", "perplexity", "broken")


class Goal(NamedTuple):
    """A metric on a set, `SET/METRIC` as in RUN/eval/step_N.json, by which checkpoints or runs are compared."""

    # The set's name. It may leave out the first folders and the last marks; see `names_set`.
    label: str
    metric: str

    @classmethod
    def parse(cls, key: str, text: str) -> Self:
        """Raise UserError, with the setting's `key`, for another form."""
        label, _, metric = text.rpartition("/")
        if not label or not metric:
            raise UserError(f"{key}={text}: give SET/METRIC, as imagenet1k/top1")
        return cls(label, metric)

    def __str__(self) -> str:
        return f"{self.label}/{self.metric}"

    @property
    def is_minimum(self) -> bool:
        """Whether the lowest value is the best."""
        return self.metric in LOWER_IS_BETTER

    def possible_sets(self, labels: Iterable[str]) -> list[str]:
        """All sets that the goal may mean."""
        return [label for label in labels if names_set(self.label, label)]

    def shortest_match(self, labels: Iterable[str]) -> str | None:
        """The possible set with the shortest label; None if there is none. `check_evaluated` refuses several."""
        return min(self.possible_sets(labels), key=len, default=None)

    def check_evaluated(self, key: str, labels: Sequence[str], sized: Sequence[str] = ()) -> None:
        """Raise UserError if the goal means none or several of the evaluated `labels`. `key`: the setting's.

        `sized`: the labels of results by the first dimensions of the features, as `SET (size 64)`. They count only if
        no whole set matches.
        """
        found = self.possible_sets(labels) or self.possible_sets(sized)
        if len(found) != 1:
            what = "several such sets are" if found else "no such set is"
            names = ", ".join(found or [*labels, *sized])
            raise UserError(f"{key}={self}: {what} evaluated; give SET/METRIC of {names}")


def names_set(name: str, label: str) -> bool:
    """Whether a name means the set whose results have this label, `FOLDER/NAME (MARK) (MARK)`.

    A name may leave out the first folders and the last marks.
    """
    path, *marks = name.split(" (")
    folders = path.split("/")
    path_of_set, *marks_of_set = label.split(" (")
    return path_of_set.split("/")[-len(folders) :] == folders and marks_of_set[: len(marks)] == marks
