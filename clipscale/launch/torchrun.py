"""torchrun with the exit statuses of clipscale, restarts that meet in a new store, and one folder for an unnamed run.

A mistake in the settings or the data is not tried again.

    python -m clipscale.launch.torchrun --nnodes 2 ... -m clipscale train ...

`--standalone` is one machine, whose processes meet in a folder of this user and listen on loopback alone.

torchrun itself ends with status 1 after a clean save too, and its shared store keeps the keys of the workers before a restart
(pytorch #135712, #167288).
"""

import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipscale.common import terminal
from clipscale.common.errors import UserError
from clipscale.config.sections import LaunchConfig
from clipscale.launch.agent import AGENT, ELASTIC, STOPPED
from clipscale.launch.local import HANDLED, MARGIN_S, SHUTDOWN, first_failure, private
from clipscale.launch.processes import as_launcher
from clipscale.safe_path import protect

MEET = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--local-addr", "localhost"]


def end_s(words: Sequence[str]) -> int:
    """Seconds for workers to end their step and save after a signal to the agent, by the run's `launch.grace_s` among these words."""
    grace_s = LaunchConfig.grace_s
    for word in words:
        if word.startswith("launch.grace_s="):
            with suppress(ValueError):  # the workers name the mistake
                grace_s = float(word.partition("=")[2])
    return math.ceil(min(max(0, grace_s), 1e6)) + MARGIN_S


def agent() -> Any:
    """torchrun's agent, which says why it starts the workers again, and does not after a mistake."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and result.failures and self._remaining_restarts:
                failure = first_failure(ChildFailedError("clipscale", result.failures))
                if isinstance(failure, UserError):
                    self._remaining_restarts = 0
                else:
                    most = worker_group.spec.max_restarts
                    terminal.report(failure, failure.details)
                    terminal.say(f"restart {most - self._remaining_restarts + 1} of {most}", error=True)
            return result

    return Agent


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; returns 0, 1 (a failure), 2 (a mistake that the user can fix), or 128 + the signal after which the run was saved."""
    protect()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
    from torch.distributed.launcher import api
    from torch.distributed.run import parse_args, parse_min_max_nnodes, run

    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | as_launcher()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the lines below say it once
    vars(api)["LocalElasticAgent"] = agent()
    words = sys.argv[1:] if argv is None else list(argv)
    os.environ.setdefault(SHUTDOWN, str(end_s(words)))
    with tempfile.TemporaryDirectory(prefix="clipscale-") as folder:
        os.environ[AGENT] = folder
        if "--standalone" in words:
            os.environ.update(private(folder))
            words.remove("--standalone")
            words = [*MEET, "--rdzv-endpoint", f"{folder}/agent", *words]
        try:
            signals = ",".join(number.name for number in HANDLED)
            given = parse_args(["--signals-to-handle", signals, "--log-dir", f"{folder}/logs", *words])
            least, most = parse_min_max_nnodes(given.nnodes)
            os.environ |= {ELASTIC: "1"} if least < most else {}
            run(given)
        except SignalException as error:
            return 128 + (signal.SIGTERM if error.sigval == signal.SIGUSR1 else error.sigval)  # as in a worker
        except ChildFailedError as error:
            failure = first_failure(error)
            terminal.report(failure, getattr(failure, "details", ""))
            return 2 if isinstance(failure, UserError) else 1
        except RendezvousClosedError:
            terminal.say("error: another machine has ended the run, and says why", error=True)
            return 1
        stopped = Path(folder) / STOPPED
        return int(stopped.read_text()) if stopped.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
