"""`pipe:` runs a command only where the user allows it: never for a file's name, a listed name, or a row of a table."""

import os
from contextlib import closing
from pathlib import Path

import fsspec
import pytest

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.data.shards.access import Access, SourceError
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.data.files import write_shards

SCHEMES = ("pipe", "PIPE", "Pipe", "pIpE")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_store_runs_no_command_unless_it_is_allowed(scheme: str, tmp_path: Path) -> None:
    command = f"{scheme}:echo hello | tee {tmp_path}/ran"
    with pytest.raises(SourceError, match="not allowed"):
        Store().open(command)
    assert not (tmp_path / "ran").exists()
    with closing(Store(Access(pipes=True)).open(command).stream) as stream:
        assert stream.read() == b"hello\n"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "source",
    [
        "{scheme}:touch ran",
        "https://host/0.tar::{scheme}:touch ran",
        "{{https://host/0,{scheme}:touch ran}}",
        "file:{scheme}:touch ran",
        "FILE:{scheme}:touch ran",
        "table:{scheme}%3Atouch ran?image=a&caption=b#0-1@0",
        "{scheme}:touch ran;#.csv",
        "{scheme}:touch ran;#.parquet",
    ],
)
def test_no_source_and_no_line_of_a_list_runs_a_command(
    scheme: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = source.format(scheme=scheme)
    Path("list").write_text(f"{source}\n")
    for given in (source, "@list"):
        try:
            urls = expand(given)
        except UserError:
            continue
        for url in urls:
            problem = ReadProblem()
            assert not list(read_shard(url, problem)) and problem.reason, url
    assert not Path("ran").exists()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_is_read_whatever_its_name_looks_like(
    scheme: str, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = write_shards(tmp_path / "good", [3])
    folder = tmp_path / "received"
    folder.mkdir()
    monkeypatch.chdir(folder)
    name = f"{scheme}:touch ran;cat good.tar;#.tar"
    os.rename(shard, name)  # noqa: PTH104 (a name that looks like an address)
    for source in ("*.tar", ".", f"{folder}/*.tar", str(folder), name, f"file:{name}", f"{{{name},absent.tar}}"):
        (url,) = expand(source, allow_pipe=allowed)
        problem = ReadProblem()
        found = [raw.key for raw in read_shard(url, problem, store=Store(Access(pipes=allowed)))]
        assert len(found) == 3 and problem.reason is None, (source, url, problem)
    assert main(["data", "check", ".", f"out={tmp_path}/check", "workers=1"]) == 0
    assert not Path("ran").exists()


def test_a_listed_name_leads_to_no_other_file_system() -> None:
    system = fsspec.filesystem("memory")
    for name in ("good.tar", "a::file:///etc/passwd::b.tar"):
        system.pipe(f"/stranger/{name}", b"x")
    assert expand("memory://stranger/*.tar") == ["memory:///stranger/good.tar"]
