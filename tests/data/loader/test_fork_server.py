"""The server of data workers starts beside the imports of a run, not after them, and forks its workers."""

import json
from pathlib import Path

import pytest

from tests.data.files import write_shards
from tests.data.streams import ids, open_stream
from tests.support.interpreter import interpreted

HERE = {"PYTHONPATH": str(Path(__file__).parents[3])}


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


@pytest.mark.slow
def test_workers_of_a_users_interpreter_fill_the_same_batches(tmp_path: Path) -> None:
    """Its processes are multiprocessing's own. Other tests have forks of pytest: support/forked_processes.py."""
    write_shards(tmp_path, [8, 8, 8])
    code = f"""
import json
from tests.data.streams import ids, open_stream
with open_stream({str(tmp_path)!r}, batch=4, workers=1) as stream:
    print(json.dumps(ids(stream, 6)))
"""
    done = interpreted(code, **HERE)
    with open_stream(tmp_path, batch=4, workers=0) as stream:
        assert json.loads(done.stdout or "null") == ids(stream, 6), done.stderr
