"""Signals to a whole job do not reach the processes that help it."""

from clipscale.common.signals import SIGNALS
from tests.support.interpreter import interpreted

# Starts the tracker as a program does, and prints the signals that are blocked in it.
CODE = """
import re
from multiprocessing import resource_tracker
from pathlib import Path
from clipscale.common.signals import blocked
with blocked():
    pass
resource_tracker.ensure_running()
status = Path(f"/proc/{resource_tracker._resource_tracker._pid}/status").read_text()
print(int(re.search(r"SigBlk:\\s*(\\w+)", status)[1], 16) | int(re.search(r"SigIgn:\\s*(\\w+)", status)[1], 16))
"""


def test_the_tracker_of_semaphores_outlives_signals_to_the_job() -> None:
    done = interpreted(CODE)
    assert done.stderr == ""
    assert {number for number in SIGNALS if not int(done.stdout) >> (number - 1) & 1} == set()
