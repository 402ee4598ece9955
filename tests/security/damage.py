"""Damages files as a stranger, a bad disk or a killed copy would: cut, flipped, binary, empty, deep, or one value of a wrong type."""

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    7,
    2**40,
    2**70,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "\x1b]0;title\x07[red]\n",
    "²",
    "9" * 5000,
    [],
    [[]],
    {},
    {"x": {"y": 1}},
)
"""Values of every type that a file can hold, to stand where another type belongs."""


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(max(len(data), 1))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 4, 64])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def binary(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([1, 100, 5000]))


def empty(data: bytes, rng: random.Random) -> bytes:
    return b""


def spliced(data: bytes, rng: random.Random) -> bytes:
    """Foreign bytes in the middle: a lone surrogate, a byte-order mark, a NUL, an escape sequence, a long line."""
    part = rng.choice([b"\xed\xa0\x80", b"\xff\xfe", b"\0", b"\x1b]0;x\x07", b"\r\n\x85", b"7" * 10_000, b"{{%(["])
    at = rng.randrange(len(data) + 1)
    return data[:at] + part + data[at:]


def deep(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        [b"[" * 200_000, b'{"a":' * 100_000, b"- " * 20_000 + b"1", b"{a: " * 3_000 + b"1" + b"}" * 3_000]
    )


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, cut, flipped, flipped, binary, empty, spliced, deep)


def paths(tree: Any, depth: int = 5) -> Iterator[tuple[Any, ...]]:
    """The places of all values in nested dictionaries and lists, at most three of a list."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in items if depth else ():
        yield (key,)
        yield from ((key, *rest) for rest in paths(value, depth - 1))


def changed(tree: Any, rng: random.Random) -> Any:
    """The tree with one value of a wrong type or one missing, or a wrong value instead of the whole."""
    places = list(paths(tree))
    if not places or rng.random() < 0.05:
        return rng.choice(WRONG)
    short = [place for place in places if len(place) < 3]
    *path, last = rng.choice(short if rng.random() < 0.5 else places)
    node = tree
    for key in path:
        node = node[key]
    if rng.random() < 0.3:
        del node[last]
    elif isinstance(node, dict) and rng.random() < 0.1:
        node[rng.choice(["x", "\ud800", "\x1b[31m"])] = node.pop(last)
    else:
        node[last] = rng.choice(WRONG)
    return tree


def damaged(name: str, data: bytes, rng: random.Random) -> bytes:
    """The content of the file of that name, damaged in its bytes or, where its format is known, in one of its values."""
    if rng.random() < 0.35:
        return rng.choice(BYTES)(data, rng)
    suffix = Path(name).suffix
    if suffix == ".json":
        return _json(changed(json.loads(data), rng))
    if suffix == ".jsonl":
        lines = data.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        lines[at] = _json(changed(json.loads(lines[at]), rng)) + b"\n"
        return b"".join(lines)
    if suffix == ".yaml":
        return yaml.safe_dump(changed(yaml.safe_load(data), rng), allow_unicode=True).encode("utf-8", "surrogatepass")
    if suffix == ".pt":
        out = io.BytesIO()
        torch.save(changed(torch.load(io.BytesIO(data), weights_only=True), rng), out)
        return out.getvalue()
    return rng.choice(BYTES)(data, rng)


def _json(tree: Any) -> bytes:
    """Escaped or, as other writers do it, raw."""
    text = json.dumps(tree)
    return text.encode() if "ud800" in text else json.dumps(tree, ensure_ascii=False).encode()
