"""Reads CIFAR's python version, whose files are pickles. Nothing that they name is run or made, but for stand-ins of numpy's arrays.

It is Python's own unpickler: the one in C sets aside as much memory as a file claims.
"""

import io
import pickle
from typing import Any, Never

import numpy as np

MOST_SMALL = 1 << 22
"""Bytes of a file apart from its array and other long texts: each may become an object. CIFAR-100's training set has 2e6."""
SMALL = 1 << 12


class _Array:
    """Takes the place of an array."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.by_columns, self.data = state


class _Reconstruct:
    """Takes the place of numpy's function that makes an array, to which a pickle then gives its state."""

    def __new__(cls, *_: Any) -> Any:
        return _Array()

    def __setstate__(self, _: Any) -> None:
        """None is set."""


class _Dtype:
    def __init__(self, name: bytes | str = "", *_: Any) -> None:
        self.name = name.decode("latin-1") if isinstance(name, bytes) else name

    def __setstate__(self, _: Any) -> None:
        """Its byte order is that of single bytes."""


class _Encode:
    """Takes the place of `_codecs.encode`, by which Python 3 pickles bytes for Python 2."""

    def __new__(cls, text: str, *_: Any) -> Any:
        return text.encode("latin-1")

    def __setstate__(self, _: Any) -> None:
        """None is set."""


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


class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs")
        return _NAMES[module, name]

    def get_extension(self, code: int) -> Never:
        raise pickle.UnpicklingError(f"it names extension {code}, which no such file needs")


def values(data: bytes) -> dict[str, Any]:
    """The entries of a pickled dict, by name: numbers, bytes, lists, and arrays of bytes. Raises ValueError for anything else."""
    try:
        found = _Unpickler(_Bytes(data), encoding="bytes").load()
        return {_text(key): _array(value) if isinstance(value, _Array) else value for key, value in found.items()}
    except Exception as error:  # an unpickler raises what the wrong type of any value leads to
        raise ValueError(str(error) or type(error).__name__) from error


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def texts(value: Any) -> list[str]:
    """The texts of a list."""
    return [_text(one) for one in value]


def _array(found: _Array) -> np.ndarray:
    if not isinstance(found.dtype, _Dtype) or found.dtype.name != "u1" or found.by_columns:
        raise ValueError("an array that is not of bytes by rows")
    data = found.data.encode("latin-1") if isinstance(found.data, str) else bytes(found.data)
    return np.frombuffer(data, np.uint8).reshape(found.shape)
