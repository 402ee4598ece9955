"""Types of the values that JSON and YAML hold: a record, and the results of an evaluation."""

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
