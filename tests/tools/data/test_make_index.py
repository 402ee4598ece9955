"""The verb `data index` on the command line."""

from pathlib import Path

from clipscale.cli.main import main
from clipscale.data.shards import index
from tests.conftest import Capture
from tests.data.files import write_shards
from tests.support.interpreter import interpreted


def test_samples_are_counted_and_a_damaged_shard_is_named(tmp_path: Path, capsys: Capture) -> None:
    good, bad = write_shards(tmp_path, [3, 4])
    assert main(["data", "index", str(tmp_path)]) == 0
    assert "7 samples in 2 shards, " in capsys.readouterr().out
    assert (tmp_path / index.INDEX_FILE).is_file()
    bad.write_bytes(bad.read_bytes()[:3000])
    assert main(["data", "index", str(good), str(bad)]) == 1
    assert f"truncated_shard after 1 samples: {bad}" in capsys.readouterr().out


def test_the_verbs_load_no_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds. Tested in a new process, because this one may have loaded it."""
    shards = [str(path) for path in write_shards(tmp_path, [3, 4])]
    code = (
        "import sys; from clipscale.cli.main import main\n"
        f"done = [main(['data', tool, *{shards}]) for tool in ('index', 'check')]\n"
        "print(done, sorted({'torch', 'torchvision', 'open_clip', 'timm'} & set(sys.modules)))"
    )
    ran = interpreted(code)
    assert ran.stdout.splitlines()[-1] == "[0, 0] []", ran.stdout[-500:] + ran.stderr[-500:]
