"""The verb `data index` on the command line."""

import subprocess
import sys
from pathlib import Path

from clipscale.cli.main import main
from clipscale.data.shards import index
from tests.conftest import Cap
from tests.data.files import write_shards

Captured = Cap


def test_index_takes_brace_lists_globs_folders_and_lists(tmp_path: Path, capsys: Captured) -> None:
    write_shards(tmp_path, [3, 4, 5])
    (tmp_path / "list").write_text("".join(f"{tmp_path}/0000{i}.tar\n" for i in range(3)))
    for words in (
        [f"{tmp_path}/{{00000..00002}}.tar"],
        [f"{tmp_path}/*.tar"],
        [str(tmp_path)],
        [f"@{tmp_path}/list"],
        [str(tmp_path / f"0000{i}.tar") for i in range(3)],
    ):
        assert main(["data", "index", *words]) == 0
        assert "12 samples in 3 shards, " in capsys.readouterr().out
    assert (tmp_path / index.FILE).is_file()


def test_the_verbs_load_no_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds. Tested in a new process, because this one may have loaded it."""
    shards = [str(path) for path in write_shards(tmp_path, [3, 4])]
    code = (
        "import sys; from clipscale.cli.main import main\n"
        f"done = [main(['data', tool, *{shards}]) for tool in ('index', 'check')]\n"
        "print(done, sorted({'torch', 'torchvision', 'open_clip', 'timm'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "[0, 0] []", ran.stdout[-500:] + ran.stderr[-500:]


def test_a_damaged_shard_is_named_and_the_status_is_one(tmp_path: Path, capsys: Captured) -> None:
    good, bad = write_shards(tmp_path, [3, 4])
    bad.write_bytes(bad.read_bytes()[:3000])
    assert main(["data", "index", str(good), str(bad)]) == 1
    assert f"truncated_shard after 1 samples: {bad}" in capsys.readouterr().out
    assert (tmp_path / "clipscale-index.sqlite").is_file()
