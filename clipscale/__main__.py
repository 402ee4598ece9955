"""The program: `python -m clipscale` is `clipscale`."""

import signal
import sys

sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # timm imports it, and it leaves folders in TMPDIR


def main() -> int:
    """Run the command line; returns the exit status. Ctrl-C during the imports ends the process as a signal does."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clipscale.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":  # false in the processes that a run starts
    sys.exit(main())
