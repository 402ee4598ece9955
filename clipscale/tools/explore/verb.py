"""The verb `clipscale explore`: loads a model and its embedded set, and serves the page."""

import os
import socket
from contextlib import suppress

from clipscale.common.errors import UserError
from clipscale.common.ranks import in_this_process
from clipscale.common.terminal import print_line, show_task
from clipscale.tools.explore.search import load_matching, open_explorer
from clipscale.tools.explore.settings import ExploreConfig


def check(config: ExploreConfig) -> None:
    """`--check`: read the model and the features, and print what was found. Raises UserError if they do not match."""
    _, title, embedded = load_matching(config, on_rank0=in_this_process)
    print_line(f"checked, and nothing is started: features of {len(embedded)} samples by {title}")


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    try:
        from clipscale.tools.explore.connections import server
        from clipscale.tools.explore.server import application
    except ImportError as error:
        raise UserError(f"explore needs {error.name}; pip install 'clipscale[explore]'") from error
    show_task("loading the model and the features")
    explorer = open_explorer(config)
    try:
        listening = socket.create_server(("127.0.0.1", config.port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(f"port={config.port}: {reason}; give another, or port=0 for a free one") from error
    with listening, suppress(KeyboardInterrupt):
        port = listening.getsockname()[1]
        print_line(f"http://127.0.0.1:{port} searches {len(explorer.embedded)} pictures; Ctrl-C ends it")
        server(application(explorer)).run(sockets=[listening])
