"""A limit of the machine is one line that names it."""

import pytest

from clipscale.robustness.limits import as_user_error


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_is_one_line_that_names_the_limit(error: Exception) -> None:
    assert "ulimit" in str(as_user_error(error))
