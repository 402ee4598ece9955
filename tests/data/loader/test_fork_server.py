"""The server of data workers starts beside the imports of a run, not after them."""

from tests.support.interpreter import interpreted


def test_the_server_needs_nothing_heavy() -> None:
    code = (
        "import os, sys; from multiprocessing import forkserver; from clipscale.data.loader.fork_server import warm_up"
    )
    code += "; warm_up(); print('torch' in sys.modules); os.kill(forkserver._forkserver._forkserver_pid, 9)"
    done = interpreted(code)
    assert (done.stdout, done.stderr) == ("False\n", "")
