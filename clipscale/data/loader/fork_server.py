"""The server that data workers are forked from. Imports nothing heavy, so that it starts beside the rest of a run."""

import multiprocessing
import tempfile
from multiprocessing import forkserver

from clipscale.common.signals import blocked

PRELOADED = ["__main__", "clipscale.data.loader.workers", "clipscale.models.tokenizer"]
"""What workers import, once for all of them: torch for its resizing, and open_clip's tokenizers."""
LONGEST = 74
"""Characters of TMPDIR: a socket's path has at most 107, of which multiprocessing's own names take 32."""


def warm_up() -> None:
    """Start the server with what workers import. Returns at once; may be called again, and changes nothing then.

    A fork of the training process itself would copy CUDA's and the process group's threads in mid-step.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    if len(tempfile.gettempdir()) > LONGEST:
        tempfile.tempdir = "/tmp"
    with blocked():  # which workers inherit
        forkserver.ensure_running()
