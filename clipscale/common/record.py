"""The types of plain nested values."""

from typing import Any, TypedDict

# Values by name, as JSON and YAML hold them.
Record = dict[str, Any]
# Metrics of an evaluation set: shares in [0, 1], counts and losses; `main` is the set's main metric in its suite.
Metrics = dict[str, float]
# Metrics by the name of the set.
Results = dict[str, Metrics]


class WrittenCaption(TypedDict):
    """A picture, and the caption that a captioner has written of it."""

    # JPEG, in base64.
    picture: str
    # A caption of the picture in its set.
    caption: str
    written: str


class RunResult(TypedDict):
    """The result of a complete run, which `train` returns and result.json holds."""

    # The run's folder.
    run: str
    # Completed steps.
    step: int
    # The last step's loss.
    loss: float
    # The results of the last evaluation.
    eval: Results


class EvalRecord(TypedDict):
    """The file of an evaluation, eval/step_N.json."""

    # None if the weights belong to no step.
    step: int | None
    results: Results
    # What each set's results belong to: its images, versions, the precision.
    measured: dict[str, dict[str, object]]
