"""A limit of the machine is one line that names it."""

import errno
import os

import pytest

from clipscale.common.limits import SHARED_MEMORY, explain_limit


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_is_one_line_that_names_the_limit(error: Exception) -> None:
    assert "ulimit" in str(explain_limit(error))


def system_error(number: int, file: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), file)


def test_an_error_is_of_shared_memory_only_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system names no file of shared memory, or one there. Another file's error stays as it is."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != SHARED_MEMORY)
    for number in (errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOSYS):
        for file in (None, f"{SHARED_MEMORY}/torch_1"):
            assert f"{SHARED_MEMORY} cannot be written" in str(explain_limit(system_error(number, file)))
        other = system_error(number, "runs/a/checkpoints/step_00000004/meta.json")
        assert explain_limit(other) is other
    other = system_error(errno.ECONNRESET)
    assert explain_limit(other) is other
