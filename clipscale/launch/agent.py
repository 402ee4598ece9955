"""What a worker leaves for its agent (torchrun.py), and for the worker that takes its place, in a folder of the agent."""

import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from clipscale.common.errors import StoppedError, UserError
from clipscale.config.redact import redact

AGENT = "CLIPSCALE_AGENT"
"""Names a folder of one machine's agent, which outlives its workers."""
ELASTIC = "CLIPSCALE_ELASTIC"
"""Set where torchrun may start the workers on fewer nodes than before, or on more."""
STARTED = "CLIPSCALE_STARTED_RANKS"
"""The ranks that torchrun has started; WORLD_SIZE counts those that train."""
STOPPED = "stopped"
"""File with the exit status of a run that a signal has stopped."""
END = "clipscale/end"
"""In the store of the ranks: 0, or the signal that has stopped the run. Below it, the ranks that have read it."""
LOOK_S, READ_S = 1.0, 30.0


def speaks(error: UserError) -> bool:
    """Whether this process prints the error: rank 0 does. Its agent, if it is ours, prints a mistake of any rank."""
    return os.environ.get("RANK", "0") == "0" and (AGENT not in os.environ or isinstance(error, StoppedError))


def status(error: UserError) -> int:
    """The exit status of a process whose run ended with this error.

    All ranks end together after a signal. To an agent this is no failure, which it would answer with a restart: it finds the status in
    its folder.
    """
    if not isinstance(error, StoppedError):
        record(error)
        return 2
    number = 128 + error.number
    if AGENT not in os.environ:
        return number
    (Path(os.environ[AGENT]) / STOPPED).write_text(str(number))
    return 0


def record(error: UserError) -> None:
    """Name the mistake to torchrun, also where it is found before the run begins."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if file.name and not file.exists():
        about = {"py_callstack": "", "timestamp": str(int(time.time()))}
        text = redact(f"{UserError.__name__}: {error}")
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": about}}))


def begin() -> None:
    """The workers of this agent begin. A signal before, for a restart with more nodes, is not the end of the run."""
    if AGENT in os.environ:
        (Path(os.environ[AGENT]) / STOPPED).unlink(missing_ok=True)


def end(number: int) -> None:
    """On rank 0: release the ranks that wait for the run's end. `number`: the signal that has stopped it, or 0.

    Returns when they know: the store may live in this process.
    """
    from clipscale.distributed.world import store

    if ELASTIC in os.environ and os.environ["RANK"] == "0":
        store().set(END, str(number))
        size = int(os.environ["WORLD_SIZE"])
        for rank in range(size, int(os.environ.get(STARTED, size))):
            with suppress(RuntimeError):  # it has died
                store().wait([f"{END}/{rank}"], timedelta(seconds=READ_S))


def wait_for_end() -> None:
    """Wait for the end of a run that does not need this rank. Raises StoppedError where a signal has stopped it."""
    from clipscale.distributed.world import store

    while not store().check([END]):
        time.sleep(LOOK_S)
    number = int(store().get(END))
    store().set(f"{END}/{os.environ['RANK']}", "")
    if number:
        raise StoppedError("stopped by a signal", number)


def shared_name(name: str) -> str:
    """One default name of the run for all ranks: that of the workers before a restart, or rank 0's. Clocks differ between machines."""
    from clipscale.distributed import world as distributed

    store, rank = distributed.store(), os.environ["RANK"]
    held = Path(os.environ[AGENT]) / "run" if AGENT in os.environ else None
    store.set(f"clipscale/run/{rank}", held.read_text() if held and held.exists() else "")
    if rank == "0":
        found = [store.get(f"clipscale/run/{other}").decode() for other in range(int(os.environ["WORLD_SIZE"]))]
        store.set("clipscale/run", next(filter(None, found), name))
    chosen = store.get("clipscale/run").decode()
    if held:
        temporary = held.with_name(f"run-{rank}")
        temporary.write_text(chosen)
        temporary.replace(held)
    return chosen
