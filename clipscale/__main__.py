"""`python -m clipscale` is `clipscale`."""

import sys

if __name__ == "__main__":  # false in the processes that a run starts
    from clipscale.cli.main import main

    sys.exit(main())
