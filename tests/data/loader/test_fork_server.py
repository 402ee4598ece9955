"""The server of data workers starts beside the imports of a run, not after them."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted


@pytest.mark.parametrize("characters", [0, 75, 76], ids=["", "the longest for a socket", "too long for a socket"])
def test_the_server_needs_nothing_heavy_and_any_folder_of_temporary_files(short_folder: Path, characters: int) -> None:
    """Clusters have long ones, with the numbers of jobs. Files other than the socket stay there."""
    place = Path(f"{short_folder}/".ljust(characters, "x"))
    place.mkdir(exist_ok=True)
    code = (
        "import os, sys, tempfile; from multiprocessing import forkserver;"
        "from clipscale.data.loader.fork_server import warm_up"
    )
    code += "; warm_up(); print('torch' in sys.modules, tempfile.gettempdir())"
    code += "; os.kill(forkserver._forkserver._forkserver_pid, 9)"
    done = interpreted(code, TMPDIR=str(place))
    assert (done.stdout, done.stderr) == (f"False {place}\n", "")
