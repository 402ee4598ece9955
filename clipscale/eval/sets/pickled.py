"""Reads CIFAR's python version, whose files are pickles of Python 2. Nothing that they name is imported or called.

pickletools splits a file into operations, and a small stack machine does those that these files need. Python's own unpicklers do all
of them, and set aside as much memory as a file claims.
"""

import pickletools
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
MOST_OPERATIONS = 1 << 19
"""Of a file, each of which makes at most one small object. CIFAR-100's training set has 2e5."""
MOST_TEXT = 1 << 22
"""Bytes of all class names."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "array",
    "numpy dtype": "dtype",
}
"""What a file may name; the machine does it itself."""


class _Name(str):
    """One of these on the stack."""


class _Array:
    """An array, whose state follows: version, shape, dtype, whether it lies by columns, bytes."""

    state: tuple[Any, ...] = ()


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        for number, (code, argument, _) in enumerate(pickletools.genops(data)):
            if number >= MOST_OPERATIONS:
                raise ValueError("too many values")
            self.do(code.name, argument)

    def do(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "STOP":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[name])
            case "BININT" | "BININT1" | "BININT2" | "BINUNICODE":
                stack.append(argument)
            case "BINSTRING" | "SHORT_BINSTRING":  # Python 2's texts are bytes
                stack.append(argument.encode("latin-1"))
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append({} if name == "EMPTY_DICT" else [])
            case "EMPTY_TUPLE" | "TUPLE":
                stack.append(tuple(self.after_mark()) if name == "TUPLE" else ())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(reversed([stack.pop() for _ in range(int(name[-1]))])))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "APPEND" | "APPENDS":
                values = self.after_mark() if name == "APPENDS" else [stack.pop()]
                self.last(list).extend(values)
            case "SETITEM" | "SETITEMS":
                pairs = self.after_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                if not all(isinstance(key, bytes | str) for key in pairs[::2]):  # hashes of nested tuples take long
                    raise ValueError("a key that is no text")
                self.last(dict).update(zip(pairs[::2], pairs[1::2]))
            case "GLOBAL":
                if argument not in _NAMES:
                    raise ValueError(f"it names {argument[:160].replace(' ', '.')}, which no such file needs")
                stack.append(_Name(_NAMES[argument]))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, _Name) or not isinstance(arguments, tuple):
                    raise ValueError("a call with other arguments")
                stack.append(_Array() if function == "array" else arguments[0])  # a dtype is its name
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], bytes | str):  # a dtype's state is its byte order; single bytes have none
                    self.last(_Array).state = state
            case _:
                raise ValueError(f"it has the operation {name}, which no such file needs")

    def after_mark(self) -> list[Any]:
        """What lies above the last mark, which is taken off the stack."""
        at = self.marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def last(self, kind: type[T]) -> T:
        """The value on the stack, of that type."""
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"a value or a state of something else than a {kind.__name__}")
        return self.stack[-1]


def values(data: bytes) -> dict[str, Any]:
    """The entries of a pickled dict, by name: numbers, bytes, lists, and arrays of bytes. Raises ValueError for anything else."""
    try:
        found = _Machine(data).last(dict)
        return {_text(key): _array(value) if isinstance(value, _Array) else value for key, value in found.items()}
    except Exception as error:  # a value of the wrong type leads to many kinds
        raise ValueError(str(error)[:300] or type(error).__name__) from error


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def texts(value: Any) -> list[str]:
    """The texts of a list. Raises ValueError for anything else: a number or a nested list has a text of any length."""
    if not isinstance(value, list) or not all(isinstance(one, bytes | str) for one in value):
        raise ValueError("no list of texts")
    if sum(map(len, value)) > MOST_TEXT:
        raise ValueError("texts of too many bytes")
    return [_text(one) for one in value]


def _array(found: _Array) -> np.ndarray:
    """Shares the bytes of the file: a file may give one array many names."""
    _, shape, dtype, by_columns, data = found.state
    if dtype not in ("u1", b"u1") or by_columns or not isinstance(data, bytes):
        raise ValueError("an array that is not of bytes by rows")
    return np.frombuffer(data, np.uint8).reshape(shape)
