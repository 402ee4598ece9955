"""Reads CIFAR's python version, whose files are pickles. Nothing that they name is run or made, but for stand-ins of numpy's arrays.

It is Python's own unpickler, with the opcodes that these files need: the one in C sets aside as much memory as a file claims.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, Never

import numpy as np

MOST_SMALL = 1 << 22
"""Bytes of a file apart from its array and other long texts: each may become an object. CIFAR-100's training set has 2e6."""
SMALL = 1 << 12
MOST_ARGUMENTS = 3
"""Of a call: numpy's functions have so many."""


class _Array:
    """Takes the place of an array, whose state follows."""

    state: tuple[Any, ...] = ()


class _Dtype:
    """Takes the place of an array's type."""

    def __init__(self, name: bytes | str = "", *_: Any) -> None:
        self.name = name


class _Reconstruct:
    """Takes the place of numpy's function that makes an array."""

    def __new__(cls, *_: Any) -> Any:
        return _Array()


class _Encode:
    """Takes the place of `_codecs.encode`, by which Python 3 pickles bytes for Python 2."""


_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encode,
}


class _Bytes(io.BytesIO):
    """A file of which so many small pieces are read."""

    left = MOST_SMALL

    def _counted(self, data: bytes) -> bytes:
        if len(data) < SMALL:
            self.left -= max(1, len(data))
        if self.left < 0:
            raise pickle.UnpicklingError("too many values")
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().read(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().readline(size))


class _Dict(dict[bytes | str, Any]):
    """Takes only texts as keys: the hash of nested tuples may take for ever."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, bytes | str):
            raise pickle.UnpicklingError("a key that is no text")
        super().__setitem__(key, value)


class _Opcodes(dict[int, Any]):
    def __missing__(self, code: int) -> Never:
        raise pickle.UnpicklingError(f"it has opcode {code:#x}, which no such file needs")


class _Unpickler(pickle._Unpickler):
    """What an opcode makes takes no more memory than its bytes in the file, or some 80 bytes for each small one."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(_Bytes(data), encoding="bytes")
        self.left = len(data)
        """Bytes that texts may be encoded to: a file names a text as often as it likes."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}, which no such file needs")
        return _NAMES[module, name]

    def make_dict(self) -> None:
        self.stack.append(_Dict())

    def make_dict_of_items(self) -> None:
        if self.pop_mark():
            raise pickle.UnpicklingError("a dict of an older form")
        self.make_dict()

    def call(self) -> None:
        """Call a stand-in. The arguments are a short tuple: a text as arguments would become an object a letter."""
        arguments, made = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or len(arguments) > MOST_ARGUMENTS or not isinstance(made, type):
            raise pickle.UnpicklingError("a call with other arguments")
        self.stack.append(self.encoded(*arguments) if made is _Encode else made(*arguments))

    def encoded(self, text: Any, *_: Any) -> bytes:
        if not isinstance(text, str) or len(text) > self.left:
            raise pickle.UnpicklingError("texts are encoded to too many bytes")
        self.left -= len(text)
        return text.encode("latin-1")

    def set_state(self) -> None:
        """The state of a type is its byte order, which single bytes have not."""
        state, one = self.stack.pop(), self.stack[-1]
        if isinstance(one, _Array) and isinstance(state, tuple):
            one.state = state
        elif not isinstance(one, _Dtype):
            raise pickle.UnpicklingError("a state of something else")

    dispatch = _Opcodes(
        {
            ord(code): pickle._Unpickler.dispatch[ord(code)]
            for code in (
                *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL),
                *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
                *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
                *(pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG, pickle.LONG1),
                *(pickle.FLOAT, pickle.BINFLOAT),
                *(pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.UNICODE, pickle.BINUNICODE),
                *(pickle.BINBYTES, pickle.SHORT_BINBYTES),
                *(pickle.TUPLE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
                *(pickle.LIST, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
            )
        }
        | {ord(pickle.EMPTY_DICT): make_dict, ord(pickle.DICT): make_dict_of_items}
        | {ord(pickle.REDUCE): call, ord(pickle.BUILD): set_state}
    )


def values(data: bytes) -> dict[str, Any]:
    """The entries of a pickled dict, by name: numbers, bytes, lists, and arrays of bytes. Raises ValueError for anything else."""
    try:
        found = _Unpickler(data).load()
        return {_text(key): _array(value) if isinstance(value, _Array) else value for key, value in found.items()}
    except Exception as error:  # an unpickler raises what the wrong type of any value leads to
        raise ValueError(str(error)[:300] or type(error).__name__) from error


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def texts(value: Any) -> list[str]:
    """The texts of a list. Raises ValueError for anything else: a number or a nested list has a text of any length."""
    if not isinstance(value, list) or not all(isinstance(one, bytes | str) for one in value):
        raise ValueError("no list of texts")
    if sum(map(len, value)) > MOST_SMALL:
        raise ValueError("texts of too many bytes")
    return [_text(one) for one in value]


def _array(found: _Array) -> np.ndarray:
    """Shares the bytes of the file: a file may give one array many names."""
    _, shape, dtype, by_columns, data = found.state
    if not isinstance(dtype, _Dtype) or dtype.name not in ("u1", b"u1") or by_columns or not isinstance(data, bytes):
        raise ValueError("an array that is not of bytes by rows")
    return np.frombuffer(data, np.uint8).reshape(shape)
