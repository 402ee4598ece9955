"""Writes sources of every kind, packs them, and reads what was packed."""

import csv
import json
from functools import partial
from pathlib import Path

from clipscale.cli.main import main
from clipscale.data.shards.reader import ReadFailure, read_shard


def paths(folder: Path) -> list[str]:
    """The pictures of the fixture `pictures`, as paths in its folder."""
    return [str(path.relative_to(folder)) for path in sorted((folder / "deep").iterdir())]


def read_all(shard: Path) -> list[dict[str, bytes]]:
    """The members of all samples."""
    problem = ReadFailure()
    read = [sample.members for sample in read_shard(str(shard), problem)]
    assert problem.reason is None
    return read


def samples(folder: Path) -> list[dict[str, bytes]]:
    """The members of all samples, in the order of shards."""
    return [members for shard in sorted(folder.glob("*.tar")) for members in read_all(shard)]


def pack_to(out: Path, source: Path, *words: str) -> int:
    """The status of the command."""
    return main(["data", "pack", str(source), f"out={out}", *words])


def as_csv(folder: Path) -> Path:
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *((path, f"all, of {path}") for path in paths(folder))])
    return folder / "table.csv"


# Of a table: its name, its header, a row and the encoding. In a row are a path, that with Windows' separators, and its
# last part.
TEXTS = {
    "tabs": ("table.tsv", "filepath\ttitle\n", "{0}\tall, of {0}\n", "utf-8"),
    "excel": ("table.CSV", "Image Path ; Text\r\n", "{1};all, of {0}\r\n", "utf-16"),
    "flickr30k": ("table.txt", "image_name| comment_number| comment\n", "{0}| 0| all, of {0}\n", "utf-8-sig"),
    "tokens": ("table.txt", "", "{0}#0\tall, of {0}\n", "utf-8"),
    "conceptual": ("table.tsv", "", "all, of {0}\t{0}\n", "utf-8"),
    "json": ("table.json", '{{"id": 1}}\n', '{{"image": "{0}", "prompt": "all, of {0}"}}\n', "utf-8"),
    "list": ("table.json", '[{{"id": 1, "images": []}}', ',\n{{"image": "{0}", "captions": ["all, of {0}"]}}', "utf-8"),
    "lines": ("metadata.jsonl", "", '{{"file_name": "{0}", "text": "all, of {0}"}}\n', "utf-8"),
    "split": ("deep/metadata.csv", "file_name,prompt\n", '{2},"all, of {0}"\n', "utf-8"),
}


def as_text(form: str, folder: Path) -> Path:
    name, head, row, encoding = TEXTS[form]
    rows = [row.format(path, path.replace("/", "\\"), Path(path).name) for path in paths(folder)]
    text = head.format() + "".join(rows) + ("]" if form == "list" else "")
    (folder / name).write_text(text, encoding=encoding)
    return folder if "metadata" in name else folder / name


def as_texts_beside(folder: Path) -> Path:
    for path in paths(folder):
        (folder / path).with_suffix(".txt").write_text(f"all, of {path}\n")
    return folder


def as_parquet(inside: bool, folder: Path) -> Path:
    """A Parquet table with pictures inside, or with their paths."""
    import pyarrow as pa
    from pyarrow import parquet

    cells = [{"bytes": (folder / path).read_bytes(), "path": path} for path in paths(folder)]
    table = {"image": cells if inside else paths(folder), "caption": [f"all, of {path}" for path in paths(folder)]}
    parquet.write_table(pa.table(table), folder / "table.parquet", row_group_size=4)
    return folder / "table.parquet" if inside else folder


def as_coco(folder: Path) -> Path:
    images = [{"id": number, "file_name": path} for number, path in enumerate(paths(folder))]
    annotations = [{"image_id": image["id"], "caption": f"all, of {image['file_name']}"} for image in images]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return folder / "captions.json"


KINDS = {"csv": as_csv, "texts": as_texts_beside, "coco": as_coco}
KINDS |= {"cells": partial(as_parquet, True), "paths": partial(as_parquet, False)}
KINDS |= {form: partial(as_text, form) for form in TEXTS}


def packed(source: Path, out: Path, *settings: str) -> tuple[dict, dict[str, int]]:
    """The captions of the packed pairs by the pictures' names, and how many were left out for each reason."""
    status = pack_to(out, source, *settings)
    reasons = {
        reason: len(names)
        for note in sorted(out.glob("parts/*.json"))
        for reason, names in json.loads(note.read_text())["left_out"].items()
    }
    pairs = {json.loads(members["json"])["source"]: members["txt"].decode() for members in samples(out)}
    assert status == (0 if pairs else 2)
    return pairs, reasons
