"""The server that data workers are forked from. Imports nothing heavy, so that it starts beside the rest of a run."""

import multiprocessing
from multiprocessing import forkserver

from clipscale.common.scratch import scratch
from clipscale.common.signals import blocked

TOKENIZER = "open_clip.tokenizer"
"""Of open_clip's own models. The library takes seconds to import."""


def warm_up(tokenizer: str = TOKENIZER) -> None:
    """Start the server with what workers import. Returns at once; may be called again, and changes nothing then.

    A fork of the training process itself would copy CUDA's and the process group's threads in mid-step.
    """
    multiprocessing.set_forkserver_preload(["__main__", "clipscale.data.loader.workers", tokenizer])
    scratch()  # where it listens
    with blocked():  # which workers inherit
        forkserver.ensure_running()
