"""The verbs `data index` and `data stats` on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clipscale.cli.main import main
from clipscale.data.shards import index
from tests.data.files import write_shards

Captured = pytest.CaptureFixture[str]


def test_index_takes_brace_lists_globs_folders_and_lists(tmp_path: Path, capsys: Captured) -> None:
    write_shards(tmp_path, [3, 4, 5], sized=False)
    (tmp_path / "list").write_text("".join(f"{tmp_path}/0000{i}.tar\n" for i in range(3)))
    for words in (
        [f"{tmp_path}/{{00000..00002}}.tar"],
        [f"{tmp_path}/*.tar"],
        [str(tmp_path)],
        [f"@{tmp_path}/list"],
        [str(tmp_path / f"0000{i}.tar") for i in range(3)],
    ):
        assert main(["data", "index", *words]) == 0
        assert "12 samples in 3 shards" in capsys.readouterr().out
    assert (tmp_path / index.FILE).is_file()


def test_the_verbs_load_no_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds. Tested in a new process, because this one may have loaded it."""
    shards = [str(path) for path in write_shards(tmp_path, [3, 4], sized=False)]
    code = (
        "import sys; from clipscale.cli.main import main\n"
        f"done = [main(['data', tool, *{shards}]) for tool in ('index', 'stats')]\n"
        f"done.append(main(['data', 'check', *{shards}, 'workers=1']))\n"
        "print(done, sorted({'torch', 'torchvision', 'open_clip', 'timm'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "[0, 0, 0] []", ran.stdout[-500:] + ran.stderr[-500:]


def test_the_index_is_written_to_cache(tmp_path: Path, capsys: Captured) -> None:
    write_shards(tmp_path / "set", [3], sized=False)
    assert main(["data", "index", str(tmp_path / "set"), f"cache={tmp_path}/cache"]) == 0
    assert f"  {tmp_path}/cache/index/" in capsys.readouterr().out
    assert not (tmp_path / "set" / index.FILE).exists()


def test_a_damaged_shard_is_named_and_the_status_is_one(tmp_path: Path, capsys: Captured) -> None:
    good, bad = write_shards(tmp_path, [3, 4], sized=False)
    bad.write_bytes(bad.read_bytes()[:3000])
    assert main(["data", "index", str(good), str(bad)]) == 1
    assert f"truncated_shard after 1 samples: {bad}" in capsys.readouterr().out


def test_stats_come_from_the_index_or_the_headers(tmp_path: Path, capsys: Captured) -> None:
    paths = write_shards(tmp_path, [3, 5], sized=False)
    assert main(["data", "stats", str(tmp_path)]) == 0
    assert "8 samples in 2 shards of 3 to 5" in capsys.readouterr().out
    main(["data", "index", str(tmp_path)])
    capsys.readouterr()
    assert main(["data", "stats", str(tmp_path), "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["indexed"], found["samples_per_shard"]) == (8, 2, [3, 5])
    assert found["bytes"] == sum(path.stat().st_size for path in paths)
    assert {name: kind["count"] for name, kind in found["members"].items()} == {"json": 8, "png": 8, "txt": 8}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no shards given"),
        (["/nowhere/{0..3}.tar"], "shards='/nowhere/{0..3}.tar' matches no shard"),
        (["x.tar", "cahce=/tmp"], "unknown key 'cahce'; did you mean 'cache'?"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: Captured) -> None:
    assert main(["data", "index", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
