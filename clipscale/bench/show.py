"""The table (.md) and the picture (.png) of records of benchmarks, again, beside them: `python -m clipscale.bench.show RECORD.json ...`."""

import json
import sys
from pathlib import Path

from clipscale.bench import data, largest, loss, runs, step
from clipscale.report.table import plain_console

PRESENT = {
    "loss": loss.present,
    "step": step.present,
    "data": data.present,
    "runs": runs.present,
    "largest": largest.present,
}
"""By what a record calls its benchmark."""


def main(paths: list[str]) -> None:
    """Nothing is measured, and the records stay as they are."""
    for path in map(Path, paths):
        record = json.loads(path.read_text())
        PRESENT[record["benchmark"]](record, path, plain_console())


if __name__ == "__main__":
    main(sys.argv[1:])
