"""A user's own pipeline over what strangers wrote, for `data.pipeline=MODULE:FUNCTION`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLES = "CLIPSCALE_TEST_SAMPLES"
"""The variable that names a JSON file with samples; their pictures are text, a character for each byte."""


def samples(stream: int, streams: int, epoch: int) -> Iterator[Any]:
    """Whatever the file holds, as this pipeline's samples."""
    try:
        found = json.loads(Path(os.environ[SAMPLES]).read_bytes())
    except (ValueError, RecursionError):
        return
    for number, sample in enumerate(found if isinstance(found, list) else [found]):
        if isinstance(sample, dict) and isinstance(picture := sample.get("png"), str):
            sample["png"] = picture.encode("latin-1", "replace")
        if number % streams == stream:
            yield sample


def written(file: Path, samples: list[dict[str, bytes]]) -> None:
    """Write samples whose members are bytes."""
    file.write_text(json.dumps([{name: data.decode("latin-1") for name, data in one.items()} for one in samples]))
