"""What a received table, folder or evaluation set names is read only from where it lies, or from what the user allows."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig, TableConfig
from clipscale.data.shards.access import Access, SourceError
from clipscale.data.shards.listing import access_of, expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.data.shards.tables import place_of
from clipscale.eval.sets.load import load_set
from tests.data.files import picture

SECRET = "a private key"


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """A received folder beside private files."""
    folder = tmp_path / "received"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "own.png").write_bytes(picture(1))
    (tmp_path / "secret.png").write_bytes(picture(2))
    (tmp_path / "id_rsa").write_text(SECRET)
    return folder


def rows(source: str, root: str | None = None) -> list[tuple[str, str, dict[str, bytes]]]:
    store = Store(Access(root=root))
    found = [raw for url in expand(source) for raw in read_shard(url, ReadProblem(), store=store)]
    return [(raw.key, raw.damage, raw.members) for raw in found]


# -- folders of pictures ----------------------------------------------------------------------------------------------


def test_a_sidecar_that_links_out_of_its_folder_is_no_caption(received: Path, tmp_path: Path) -> None:
    (received / "3.png").write_bytes(picture(3))
    (received / "3.txt").symlink_to(tmp_path / "id_rsa")
    (received / "4.png").symlink_to(tmp_path / "secret.png")
    (received / "5.png").symlink_to("sub/own.png")
    found = {Path(key).name: (damage, members) for key, damage, members in rows(str(received))}
    assert {name: damage for name, (damage, _) in found.items()} == {
        "3.png": "refused_file",
        "4.png": "refused_file",
        "5.png": "",
        "own.png": "",
    }
    assert not found["3.png"][1] and not found["4.png"][1]
    assert {damage for _, damage, _ in rows(str(received), str(tmp_path))} == {""}
    out = tmp_path / "out"
    assert main(["data", "check", str(received), f"out={out}", "workers=1"]) == 1
    assert not any(SECRET in path.read_text() for path in out.iterdir())


def test_a_snapshot_of_the_hugging_face_cache_is_read(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "0123").mkdir(parents=True)
    (repository / "blobs" / "77").write_bytes(picture(1))
    (repository / "snapshots" / "0123" / "1.png").symlink_to("../../blobs/77")
    assert [damage for _, damage, _ in rows(str(repository / "snapshots" / "0123"))] == [""]


# -- tables -----------------------------------------------------------------------------------------------------------


def test_a_local_table_names_files_of_its_own_folder_unless_a_root_is_given(received: Path, tmp_path: Path) -> None:
    (received / "out.png").symlink_to(tmp_path / "secret.png")
    names = ["sub/own.png", str(received / "sub/own.png"), "../secret.png", str(tmp_path / "secret.png"), "out.png"]
    names += [
        f"file://{tmp_path}/secret.png",
        f"simplecache::file://{tmp_path}/secret.png",
        f"local:{tmp_path}/secret.png",
    ]
    (received / "t.csv").write_text("filepath,title\n" + "".join(f"{name},a\n" for name in names))
    refused = ["refused_file"] * 3
    assert [damage for _, damage, _ in rows(f"{received}/t.csv")] == ["", "", *refused, *refused]
    for root in (str(tmp_path), "/"):
        assert [damage for _, damage, _ in rows(f"{received}/t.csv", root)] == [""] * 5 + refused
    assert [damage for _, damage, _ in rows(f"{received}/t.csv", str(tmp_path / "other"))] == ["refused_file"] * 8


def test_the_setting_reaches_the_reader_and_no_address_of_rows_sets_it(received: Path) -> None:
    assert access_of(DataConfig(table=TableConfig(root="/data"))).root == "/data"
    (received / "t.csv").write_text("a,b\n../secret.png,x\n")
    with pytest.raises(UserError, match="addresses of rows"):
        expand(f"table:{received}/t.csv?image=a&caption=b&sidecar=b&root=/#0-1@4")


TABLES = (
    "https://host/set/t.csv",
    "s3://bucket/set/t.parquet",
    "hf://datasets/owner/name/t.csv",
    "http://host:81/t.csv?key=1",
)


@pytest.mark.parametrize("table", TABLES)
def test_a_remote_table_names_its_own_server(table: str) -> None:
    folder = table.split("?")[0].rpartition("/")[0]
    assert place_of(table, "images/1.png") == f"{folder}/images/1.png"
    assert place_of(table, f"{folder}/a/1.png") == f"{folder}/a/1.png"


OTHERS = [
    "/etc/passwd",
    "file:///etc/passwd",
    "FILE:/etc/passwd",
    "http://127.0.0.1:9/a",
    "https://host.evil/1.png",
    "s3://other/1.png",
]
OTHERS += [
    "https://host@evil/1.png",
    "hf://datasets/owner/other/1.png",
    "x::file:///etc/passwd",
    "a b::file:///etc/passwd",
    "~/id_rsa",
]
OTHERS += ["memory://x", "s3://bucket/a::file:///etc/passwd", "//evil/1.png", "https:/etc/passwd", "https://host"]


@settings(max_examples=300)
@given(
    table=st.sampled_from(TABLES),
    name=st.sampled_from(OTHERS)
    | st.text("/:.aHh~s3fileps@?#% \\", max_size=24)
    | st.tuples(st.sampled_from(OTHERS), st.text(max_size=5)).map("".join),
)
@example(TABLES[1], "a b::file:///etc/passwd")
def test_a_remote_table_names_nothing_else(table: str, name: str) -> None:
    """Whatever is accepted begins with the table's own origin and leads through no other file system."""
    origin = "/".join(table.split("/")[: 5 if table.startswith("hf") else 3])
    try:
        place = place_of(table, name)
    except SourceError as error:
        assert error.reason == "refused_file" and "data.table.root" in str(error)
        return
    assert f"{place}/".startswith(f"{origin}/") and "::" not in place, place


def test_a_root_of_the_user_allows_other_places() -> None:
    assert place_of(TABLES[0], "https://cdn/images/1.png", "https://cdn/images") == "https://cdn/images/1.png"
    assert place_of(TABLES[0], "/data/1.png", "/data") == "/data/1.png"
    for name, root in (
        ("https://cdn/images2/1.png", "https://cdn/images"),
        ("/data2/1.png", "/data"),
        ("/data/../x", "/data"),
    ):
        with pytest.raises(SourceError):
            place_of(TABLES[0], name, root)


# -- evaluation sets --------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["coco", "karpathy"]),
    name=st.sampled_from(
        ["../secret.png", "{outside}/secret.png", "link.png", "sub/../../secret.png", "images/link/secret.png"]
    ),
    first=st.booleans(),
)
def test_captions_name_images_of_their_own_set(kind: str, name: str, first: bool) -> None:
    with TemporaryDirectory() as place:
        outside, root = Path(place), Path(place) / "sets" / "received"
        (root / "images").mkdir(parents=True)
        (outside / "secret.png").write_bytes(picture(2))
        (root / "own.png").write_bytes(picture(1))
        (root / "link.png").symlink_to(outside / "secret.png")
        (root / "images" / "link").symlink_to(outside)
        names = ["own.png", name.format(outside=outside)]
        names = names[:: -1 if first else 1]
        if kind == "coco":
            images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
            record = {"images": images, "annotations": [{"image_id": i, "caption": "a"} for i in range(2)]}
        else:
            image = {"split": "test", "sentences": [{"raw": "a"}]}
            record = {"images": [image | {"filename": name} for name in names]}
        (root / "captions.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match=r"eval\.sets: .*(outside|cannot find)"):
            load_set(root)


@pytest.mark.parametrize(
    "name", ["classnames.txt", "dataset_type.txt", "zeroshot_classification_templates.txt", "test/nshards.txt"]
)
def test_texts_of_a_set_that_link_out_of_it_are_not_read(received: Path, tmp_path: Path, name: str) -> None:
    (received / "test").mkdir()
    (received / "test" / "nshards.txt").write_text("1\n")
    (received / "test" / "0.tar").write_bytes(bytes(1024))
    (received / name).unlink(missing_ok=True)
    (received / name).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(UserError) as caught:
        load_set(received)
    assert SECRET not in str(caught.value)


def test_images_of_a_set_may_be_links_within_it(received: Path) -> None:
    (received / "link.png").symlink_to("sub/own.png")
    record = {"images": [{"id": 0, "file_name": "link.png"}], "annotations": [{"image_id": 0, "caption": "a"}]}
    (received / "captions.json").write_text(json.dumps(record))
    assert os.path.realpath(load_set(received / "captions.json").images[0].path) == str(
        received.resolve() / "sub/own.png"
    )
