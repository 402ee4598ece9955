"""`python -m clipscale`: the same program as the command `clipscale`."""

import signal
import sys

# Signals from a scheduler, or from a terminal that closes.
SIGNALS_OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # timm imports it, and it leaves folders in TMPDIR


def main() -> int:
    """Run the command line; returns the exit status. Ctrl-C during the imports ends the process as a signal does."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clipscale.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    status = run()
    for number in SIGNALS_OF_SCHEDULERS:  # a signal while the interpreter exits must not change the status
        signal.signal(number, signal.SIG_IGN)
    return status


if __name__ == "__main__":  # false in the processes that a run starts
    sys.exit(main())
