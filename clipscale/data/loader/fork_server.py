"""The server that forks data workers. Imports nothing heavy, so that it starts while the rest of a run imports."""

import multiprocessing
from multiprocessing import forkserver

from clipscale.common.signals import blocked

# The server imports these once for all workers: torch for resizing, and open_clip's tokenizers.
PRELOADED = ["__main__", "clipscale.data.loader.workers", "clipscale.models.tokenizer"]


def warm_up() -> None:
    """Start the server, which imports PRELOADED. Returns at once; a second call changes nothing.

    Workers are not forked from the training process: its CUDA and process-group threads do not survive a fork.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with blocked():  # workers inherit the blocked signals
        forkserver.ensure_running()
