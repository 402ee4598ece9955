"""Reads the rows of JSON. A file holds one of these:

- a row a line,
- a list of rows,
- an object that holds rows: by column, by picture, or as a list.

Nested rows, such as conversations, are not read. The message has a line of shell that makes a table of them.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from clipscale.data.sample import BrokenSampleError, json_fields
from clipscale.tools.data.pack.lines import lines_of
from clipscale.tools.data.pack.separated import PICTURE, Row

# Column of nested rows -> the Python that gets the caption from a row: the last answer of a conversation (LLaVA,
# OpenAI), or the first of Karpathy's sentences.
CAPTIONS = {
    "conversations": '["conversations"][-1]["value"]',
    "messages": '["messages"][-1]["content"]',
    "sentences": '["sentences"][0]["raw"]',
}
# Column of nested rows -> the Python that gets the picture's name from a row.
IMAGES = {"image": '["image"]', "images": '["images"][0]', "filename": '["filename"]', "file_name": '["file_name"]'}


def json_rows(file: Path) -> Iterator[tuple[int, Row | None]]:
    """Each row with its number; None for what is not a row."""
    lines = lines_of(file)
    first = next(lines, "")
    document = json_object(file)
    if document is not None or first.lstrip().startswith("["):
        rows = json.loads(first + "".join(lines)) if document is None else rows_in(document)
        yield from enumerate((row if isinstance(row, dict) else None for row in rows), 1)
        return
    for number, line in enumerate(chain([first], lines), 1):
        try:
            if line.strip():
                yield number, json_fields(line)
        except BrokenSampleError:
            yield number, None


def json_object(file: Path) -> Row | None:
    """The one object that a .json file is; None for rows in lines or in a list. Raises ValueError for neither."""
    lines = lines_of(file)
    first = next(lines, "")
    if file.suffix.lower() != ".json" or not first.lstrip().startswith("{"):
        return None
    try:
        row = json_fields(first)
    except BrokenSampleError:
        document: Row = json.loads(first + "".join(lines))
        return document
    return None if any(line.strip() for line in lines) else row


def rows_in(document: Row) -> Sequence[object]:
    """The rows that an object holds. An object without rows is itself the only one."""
    if document and all(map(PICTURE.fullmatch, document)):  # pictures and their captions, or what else is known of each
        return [
            {"image": name} | (value if isinstance(value, dict) else {"caption": value})
            for name, value in document.items()
        ]
    columns = [[*value.values()] if isinstance(value, dict) else value for value in document.values()]  # SBU, pandas
    listed = [column for column in columns if isinstance(column, list)]
    if len(listed) == len(columns) > 1 and len(set(map(len, listed))) == 1:
        return [dict(zip(document, row)) for row in zip(*listed)]
    lists = [value for value in document.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return lists[0] if len(lists) == 1 else [document]


def is_nested(rows: Sequence[Row], name: str) -> bool:
    """Whether a column holds lists or objects, and no text in any of these rows."""
    items: list[object] = []
    for row in rows:
        value = row.get(name)
        if isinstance(value, list):
            items += value
        elif value is not None:
            items.append(value)
    has_objects = any(isinstance(item, dict | list) for item in items)
    has_texts = any(isinstance(item, str) for item in items)
    return has_objects and not has_texts


def flattening_command(file: Path, names: Sequence[str]) -> str:
    """The line of shell that makes a table of a file with rows of a known nested form; empty for others."""
    captions = [name for name in CAPTIONS if name in names]
    images = [name for name in IMAGES if name in names]
    if not (captions and images):
        return ""
    image = images[0]
    caption = captions[0]
    with file.open("rb") as start:
        is_list = start.read(100).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    rows = "json.load(sys.stdin)" if is_list else "map(json.loads, sys.stdin)"
    pair = f'{{"image": r{IMAGES[image]}, "caption": r{CAPTIONS[caption]}}}'
    program = f'import json, sys; [print(json.dumps({pair})) for r in {rows} if r.get("{image}")]'
    table = file.with_name(f"{file.stem}-pairs.jsonl")
    return f"python3 -c '{program}' < {shlex.quote(str(file))} > {shlex.quote(str(table))}"
