"""The shards that a setting names."""

import re
from pathlib import Path

import pytest

from clipscale.config.data import DataConfig
from clipscale.data.addresses import is_local
from clipscale.data.shards.listing import expand, local_shards
from tests.data.files import write_shards
from tests.data.streams import open_stream
from tests.support.user_errors import refused


def test_braces_globs_folders_and_lists_name_the_same_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Missing shards are left out with a warning."""
    paths = [str(path) for path in write_shards(tmp_path / "set", [1, 1, 1])]
    (tmp_path / "list").write_text(f"# three shards\n{paths[0]}\n\n{paths[1]}\n{paths[2]}\n")
    folder = tmp_path / "set"
    for source in (f"{folder}/{{00000..00002}}.tar", f"{folder}/*.tar", str(folder), f"@{tmp_path}/list"):
        assert expand(source) == paths and not caplog.text, source
    Path(paths[1]).unlink()
    assert expand(f"{folder}/{{00000..00002}}.tar") == [paths[0], paths[2]]
    assert "1 of 3 shards do not exist" in caplog.text


def test_what_lies_beside_a_folders_shards_is_left_out_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_shards(tmp_path, [3, 3, 3])
    names = ("00000.tar", "00001.tar.gz", "00002.tgz")
    shards = [path.rename(tmp_path / name) for path, name in zip(paths, names)]
    assert expand(str(tmp_path)) == [*map(str, shards)] and not caplog.text
    beside = "0.tar.idx 1.tar.idx 0.tar.md5 3.tar.part 3.tar.6eF3a1B2 .00001.tar 4.tar 4.tar.aria2 4.tar.zst notes.txt"
    for name in beside.split():
        (tmp_path / name).write_bytes(shards[0].read_bytes()[:1000])
    with open_stream(tmp_path, batch=3) as stream:
        assert stream.epoch_samples == 9
    (line,) = caplog.messages
    assert "9 files beside" in line and "2 .idx" in line, line


def test_two_stars_reach_every_depth(tmp_path: Path) -> None:
    paths = [path for depth in ("", "a", "a/b") for path in write_shards(tmp_path / depth, [1])]
    assert {*expand(f"{tmp_path}/**/*.tar")} == {*map(str, paths)}
    assert expand(f"{tmp_path}/*/*.tar") == [str(paths[1])]


@pytest.mark.parametrize("name", ["my set.CSV", "pairs.jsonl", "captions.JSON"])
def test_a_table_and_a_folder_of_pictures_name_the_command_that_makes_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("image,caption\n")
    with refused(rf"a table; make shards of it: clipscale data pack '?{tmp_path}/{name}'? out=DIR"):
        expand(str(tmp_path / name))
    with refused(rf"a folder without shards \(.tar, .*: clipscale data pack {tmp_path} out=DIR"):
        expand(str(tmp_path))


@pytest.mark.parametrize("name", ["a[1].tar", "{a,b}.tar", "x*y.tar", "a::b.tar"])
def test_a_path_that_exists_is_itself(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "set [2024] {a,b}*"
    shards = [str(path.rename(folder / leaf)) for path, leaf in zip(write_shards(folder, [1, 1]), (name, "~z.tar"))]
    assert expand(shards[0]) == shards[:1]
    assert expand(str(folder)) == expand(f"{folder}/*.tar") == shards
    assert expand(f"{folder}/~{{y,z}}.tar") == shards[1:]


@pytest.mark.parametrize("name", ["pipe:x.tar", "http:x.tar", "s3:x.tar", "t2026-11-28T12:00.tar"])
def test_what_a_folder_holds_is_local_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A name in the present folder has no folder before it, and is local, too."""
    (shard,) = write_shards(tmp_path, [3])
    shard.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for source in (".", "./", "*.tar", name, "?" + name[1:], f"{tmp_path}/*.tar", str(tmp_path)):
        (found,) = expand(source)
        assert is_local(found) and Path(found).samefile(name), source
        with open_stream(source, batch=3) as stream:
            assert stream.epoch_samples == 3


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file://localhost{}", "{}::file:{}"])
def test_a_files_url_is_its_path(tmp_path: Path, form: str) -> None:
    (shard,) = write_shards(tmp_path, [1])
    source = form.format(shard, shard)
    assert {*expand(source)} == {str(shard)}
    assert local_shards(DataConfig(train=[source])) == expand(source)
    (tmp_path / "list").write_text(form.format(shard, shard).split("::")[-1])
    assert expand(f"@{tmp_path}/list") == [str(shard)]


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("pipe:aws s3 cp s3://b/{00..01}.tar -", "s3://b/{00..01}.tar"),
        ("pipe:curl -s -L 'https://h/a/{0..9}.tar' || true", "https://h/a/{0..9}.tar"),
        ("pipe:gsutil cat gs://b/0.tar", "gs://b/0.tar"),
        ("pipe:cat /data/{0..9}.tar", "/data/{0..9}.tar"),
        ("pipe:cat 'x.tar' -", "x.tar"),
    ],
)
def test_a_command_is_not_run_and_the_line_says_what_to_give(command: str, given: str) -> None:
    for find in (expand, lambda source: local_shards(DataConfig(train=[source]))):
        with refused(rf"no command is run; give what it reads, data\.train='{re.escape(given)}'$"):
            find(command)


@pytest.mark.parametrize(
    "pattern",
    [
        "{folder}/none-{{0..3}}.tar",
        "{folder}/*.tar",
        "{folder}",
        "@{folder}/none",
        "@{folder}/empty",
        "{folder}/{{0.tar",
    ],
)
def test_a_source_without_shards_is_named(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").write_text("\n")
    source = pattern.format(folder=tmp_path)
    with refused(rf"data\.train=.*{tmp_path}"):
        expand(source)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_list_is_read_by_its_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    """Windows' editors and shells write such files."""
    paths = [str(path) for path in write_shards(tmp_path / "set", [1, 1])]
    (tmp_path / "list").write_text("\r\n".join(paths), encoding=encoding)
    assert expand(f"@{tmp_path}/list") == paths


@pytest.mark.parametrize(
    "line", ["reference://x/0.tar", "simplecache::https://h/0.tar", "table:/x.csv", "https://h/0.tar::/etc"]
)
def test_a_list_names_paths_and_servers_alone(tmp_path: Path, line: str) -> None:
    (tmp_path / "list").write_text(f"https://host/0.tar\n{line}\n")
    with refused(r"is neither a path nor one of http, https, s3, gs, hf:"):
        expand(f"@{tmp_path}/list")


def test_specifications_are_webdatasets() -> None:
    from webdataset.shardlists import expand_urls

    for source in ("s3://b/{00..03}.tar::s3://a/{x,y}/0.tar", "https://host/{a,b}{0..1}.tar"):
        assert expand(source) == expand_urls(source)
