"""The program: `python -m clipscale` is `clipscale`."""

import signal
import sys

# Signals that a scheduler sends to a job, or a terminal that is closed.
SIGNALS_OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # timm imports it, and it leaves folders in TMPDIR


def main() -> int:
    """Run the command line; returns the exit status. Ctrl-C during the imports ends the process as a signal does."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clipscale.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    status = run()
    for number in SIGNALS_OF_SCHEDULERS:  # the interpreter's end takes a while: the status stays what it is
        signal.signal(number, signal.SIG_IGN)
    return status


if __name__ == "__main__":  # false in the processes that a run starts
    sys.exit(main())
