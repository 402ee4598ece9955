"""A metric on an evaluation set, `SET/METRIC`, by which checkpoints or runs are compared."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from clipscale.common.errors import UserError

# Metrics that are better if they are lower.
LOWER_IS_BETTER = ("loss", "caption_loss", "perplexity", "broken")


class SetLabel(NamedTuple):
    """The parts of the name of a set's results, `FOLDER/NAME (MARK) (MARK)`."""

    # The folders, then the name.
    path: tuple[str, ...]
    marks: tuple[str, ...]

    @classmethod
    def parse(cls, label: str) -> Self:
        path, *marks = label.split(" (")
        return cls(tuple(path.split("/")), tuple(mark.removesuffix(")") for mark in marks))

    def matches(self, short: "SetLabel") -> bool:
        """Whether `short` names this set. It may leave out the first folders and the last marks."""
        return self.path[-len(short.path) :] == short.path and self.marks[: len(short.marks)] == short.marks


class Goal(NamedTuple):
    """A metric on a set, `SET/METRIC` as in RUN/eval/step_N.json, by which checkpoints or runs are compared."""

    # The set's name. It may leave out the first folders and the last marks; see `SetLabel.matches`.
    label: str
    metric: str

    @classmethod
    def parse(cls, key: str, text: str) -> Self:
        """Raises UserError, with the setting's `key`, for another form."""
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
        short = SetLabel.parse(self.label)
        return [label for label in labels if SetLabel.parse(label).matches(short)]

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
