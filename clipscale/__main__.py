"""`python -m clipscale` is `clipscale`."""

import sys

from clipscale.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
