"""Plans a run that starts: reads its pickled settings, prints one JSON object. It is a process of its own."""

import os
import pickle
import sys

from clipscale.common.terminal import prepare
from clipscale.tools.plan.start import before

BESIDE = 10
"""By so much nicer than the run, which loads meanwhile."""

if __name__ == "__main__":
    prepare()
    os.nice(BESIDE)
    print(before(pickle.load(sys.stdin.buffer)))
