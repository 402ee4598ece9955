"""The server of data workers starts beside the imports of a run, not after them."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted


@pytest.mark.parametrize("place", ["", "x" * 100], ids=["", "beyond a socket's path"])
def test_the_server_needs_nothing_heavy(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    code = (
        "import os, sys; from multiprocessing import forkserver; from clipscale.data.loader.fork_server import warm_up"
    )
    code += "; warm_up(); print('torch' in sys.modules); os.kill(forkserver._forkserver._forkserver_pid, 9)"
    done = interpreted(code, **({"TMPDIR": str(tmp_path / place)} if place else {}))
    assert (done.stdout, done.stderr) == ("False\n", "")
