"""Plans a run that starts: reads its pickled settings, prints one JSON object. It is a process of its own."""

import os
import pickle
import sys
from contextlib import redirect_stdout

from clipscale.common.errors import UserError, one_line
from clipscale.common.terminal import prepare
from clipscale.tools.plan.start import before

BESIDE = 10
"""By so much nicer than the run, which loads meanwhile."""

if __name__ == "__main__":
    prepare()
    os.nice(BESIDE)
    try:
        with redirect_stdout(sys.stderr):  # libraries print, too
            plan = before(pickle.load(sys.stdin.buffer))
    except UserError as error:
        sys.exit(one_line(error))
    print(plan)
