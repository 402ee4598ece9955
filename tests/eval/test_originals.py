"""Sets as their own sites give them: the labels and pixels are those of torchvision's readers, from archives as from unpacked files."""

import io
import struct
import tracemalloc
import zipfile
import zlib
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig
from clipscale.data.shards import tar
from clipscale.eval.run import evaluate
from clipscale.eval.sets import archives, known, matlab, pickled
from clipscale.eval.sets.item import EvalSet
from clipscale.eval.sets.load import load_set, load_sets
from clipscale.eval.sets.originals import _of_ppm
from clipscale.eval.suites import suite_sets
from tests.eval.originals import Copy, copies, folders, imagenet, mat, png, ppm
from tests.eval.originals import pickled as as_pickle
from tests.eval.sets import ALONE, COLOURS, NAMES, ColourModel, picture, write_tar

SETS = {copy.name: copy for copy in copies()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ours(item: EvalSet) -> list[tuple[int, bytes]]:
    pictures = [Image.open(io.BytesIO(image.read())).convert("RGB").tobytes() for image in item.images]
    return list(zip(item.labels, pictures))


@pytest.mark.parametrize("name", SETS)
def test_labels_and_pixels_are_torchvisions(tmp_path: Path, name: str) -> None:
    copy = SETS[name]
    unpacked, packed = copy.write(tmp_path / "unpacked"), copy.pack(tmp_path / "packed")
    wanted = Counter(copy.theirs(tmp_path / "unpacked"))
    assert sum(wanted.values()) >= 2 and len({label for label, _ in wanted}) > 1
    for place in (unpacked, packed, packed if packed.is_dir() else packed.parent):
        item = load_set(place)
        assert Counter(ours(item)) == wanted, place
        assert item.templates and len(item.classnames) > max(item.labels)
        assert item.marks == (("all images",) if name == "vtab/eurosat" else ())


def test_imagenets_validation_archive_has_torchvisions_labels(tmp_path: Path) -> None:
    copy = imagenet()
    folder = copy.pack(tmp_path / "imagenet")
    item = load_set(folder)
    assert item.classnames == ["tench", "goldfish", "great white shark"] and len(item.templates) == 80
    assert ours(item) and Counter(ours(item)) == Counter(copy.theirs(folder))
    with pytest.raises(UserError, match=r"give their folder"):
        load_set(folder / "ILSVRC2012_img_val.tar")


def test_class_names_are_the_published_ones_or_the_sets_own(tmp_path: Path) -> None:
    names = {name: load_set(SETS[name].write(tmp_path / str(i))).classnames for i, name in enumerate(SETS)}
    assert names["vtab/pets"][:2] == ["Abyssinian", "American Bulldog"] and names["mnist"] == [*"0123456789"]
    assert names["sun397"] == ["abbey", "bar", "church indoor"] and names["country211"][0] == "Andorra"
    assert names["cifar10"] == names["stl10"] == ["ash", "birch_tree", "cedar"]
    assert names["food101"] == ["ash", "birch tree", "cedar"] and names["cars"] == ["ash", "birch_tree", "cedar", "d"]


def test_without_clip_benchmark_names_are_given_and_never_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "find_spec", lambda _: None)
    place = SETS["mnist"].write(tmp_path)
    with pytest.raises(UserError, match="has no class names of mnist; pip install clip-benchmark"):
        load_set(place)
    (place / "classnames.txt").write_text("\n".join(f"digit {i}" for i in range(10)))
    item = load_set(place)
    assert item.classnames[9] == "digit 9" and item.templates == ["a photo of a {c}."]


@pytest.mark.parametrize("name", ["cifar10", "vtab/cifar100"])
def test_cifars_python_version_is_its_binary_version(tmp_path: Path, name: str) -> None:
    binary = SETS[name].write(tmp_path)
    python = binary.with_name(binary.name.replace("-bin", "-py") if name == "cifar10" else "cifar-100-python")
    assert (python / ("test_batch" if name == "cifar10" else "test")).is_file()
    assert ours(load_set(python)) == ours(load_set(binary))
    assert load_set(python).classnames == load_set(binary).classnames


@pytest.mark.parametrize("name", ["caltech101", "resisc45", "fer2013"])
def test_class_folders_of_known_sets_have_their_names_and_prompts(tmp_path: Path, name: str) -> None:
    """Caltech-101's folders in the order of the names, whatever the case."""
    made = {
        "caltech101": ["BACKGROUND_Google", "Faces", "accordion", "airplanes", "anchor", "ant", *(f"c{i}" for i in range(95)), "yin_yang"],
        "resisc45": ["airplane", "baseball_diamond", "thermal_power_station"],
        "fer2013": ["test/angry", "test/disgust", "test/fear", "test/happy", "test/neutral", "test/sad", "test/surprise"],
    }[name]  # fmt: skip
    files = folders("", made)
    Copy(name, files, {}, list).write(tmp_path / name)
    item = load_set(tmp_path / name)
    assert len(item) == len(files) and len(item.templates) > 1
    if name == "caltech101":
        assert item.classnames[:5] == ["accordion", "airplane", "anchor", "ant", "background"]
        paths = [image.path.parent.name for image in item.images]  # type: ignore[attr-defined]
        assert list(dict.fromkeys(paths))[3:6] == ["ant", "BACKGROUND_Google", "c0"]
    assert item.marks == (() if name == "fer2013" else ("all images",))
    own = tmp_path / "own" / "test"
    Copy(name, folders("", ["airplane", "thermal_power_station"]), {}, list).write(own)
    assert load_set(own).marks == (), "a folder of that name is a split of the user's own"


def test_an_archive_is_found_under_the_root_and_scores_what_its_folders_score(tmp_path: Path) -> None:
    files = {f"imagenetv2-matched-frequency-format-val/{i}/{i}.jpeg": picture(n) for i, n in enumerate(NAMES)}
    v2 = Copy("imagenetv2", files, {"imagenetv2-matched-frequency.tar.gz": ""}, list)
    v2.pack(tmp_path / "root")
    for name in ("cifar10", "vtab/dtd", "vtab/pets", "gtsrb"):
        folder = tmp_path / "root" if len(SETS[name].packed) == 1 else tmp_path / "root" / name.rpartition("/")[2]
        SETS[name].pack(folder)
    found = {item.name: item for item in suite_sets("datacomp", str(tmp_path / "root"))}
    assert list(found) == ["cifar10", "vtab/dtd", "gtsrb", "imagenetv2", "vtab/pets"]
    assert len(found["imagenetv2"].classnames) == 1000 and found["imagenetv2"].labels == [*range(6)]
    assert found["vtab/pets"].metric == ("mean_per_class_recall",) and len(found["cifar10"].templates) == 18
    assert [item.name for item in load_sets([str(tmp_path / "root" / "dtd-r1.0.1.tar.gz")])] == ["dtd-r1.0.1"]


def test_an_archives_figures_are_those_of_a_plain_count(tmp_path: Path) -> None:
    shown = ["red", "green", "blue", "blue", "red", "white"]  # of the labels red, green, blue, red, green, white
    labels = [0, 1, 2, 0, 1, 3]
    records = b"".join(bytes([k]) + bytes(np.repeat(COLOURS[c], 1024).astype(np.uint8)) for k, c in zip(labels, shown))
    names = "\n".join(["red", "green", "blue", "white"]).encode()
    files = {"cifar-10-batches-bin/test_batch.bin": records, "cifar-10-batches-bin/batches.meta.txt": names}
    path = Copy("cifar10", files, {"cifar-10-binary.tar.gz": ""}, list).pack(tmp_path)
    results = evaluate(ColourModel(), EvalConfig(sets=[str(path)]), ALONE)
    assert results["cifar-10-binary"]["top1"] == 4 / 6
    assert results["cifar-10-binary"]["mean_per_class_recall"] == (1 / 2 + 1 / 2 + 1 + 1) / 4


def test_a_packed_tar_is_unpacked_once(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = SETS["vtab/dtd"].pack(tmp_path)
    load_set(path)
    kept = [file for file in (cache / "clipscale/eval").iterdir() if file.suffix != ".lock"]
    assert len(kept) == 1 and str(kept[0]) in capsys.readouterr().out
    before = kept[0].stat().st_mtime_ns
    load_set.cache_clear()
    archives.contents.cache_clear()
    load_set(path)
    assert kept[0].stat().st_mtime_ns == before and not capsys.readouterr().out


@pytest.mark.parametrize("problem", ["full", "file"])
def test_where_the_cache_cannot_be_written_the_line_names_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    path = SETS["vtab/dtd"].pack(tmp_path)
    if problem == "full":
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=archives.SPARE))
    else:
        cache.write_text("no folder")
    with pytest.raises(UserError, match=rf"kept in {cache}/clipscale/eval \(.*XDG_CACHE_HOME") as found:
        load_set(path)
    assert "fetch it again" not in str(found.value)
    assert problem == "file" or [one.suffix for one in (cache / "clipscale/eval").iterdir()] == [".lock"]


# -- what cannot be read -----------------------------------------------------------------------------------------------


class Ran:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


def test_a_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    SETS["cifar10"].write(tmp_path)
    (folder / "test_batch").write_bytes(as_pickle({b"data": Ran(), b"labels": [1]}))
    with pytest.raises(UserError, match=r"cifar-10-batches-py cannot be read \(it names __builtin__.exec, which"):
        load_set(folder)
    assert not (tmp_path / "ran").exists()


ARRAY = b"\x80\x02}U\1acnumpy\nndarray\n)R(K\1K\1\x85cnumpy\ndtype\nU\2u1\x85RK\0DATAtbs."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02]r\xff\xff\xff\xff.", "something else than a dict"),  # stored under number 2**32 - 1
        (b"\x80\x02" + b"]" * 5000 + b".", "too many values"),
        (b"\x80\x02\x82\x01.", "operation EXT1"),
        (b"\x80\x02\x8e" + struct.pack("<Q", 1 << 60) + b"x.", "expected 1152921504606846976 bytes"),
        (b"\x80\x04\x95" + struct.pack("<Q", 5000) + b"]" * 5000 + b".", "operation FRAME"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 20) + b".", "expected 1048576 bytes"),
        (b"\x80\x02c_codecs\nencode\n.", "it names _codecs.encode"),
        (b"\x80\x02cnumpy\ndtype\nU\2u1R.", "other arguments"),
        (b"\x80\x02U\5arrayK\1\x85R.", "other arguments"),  # a text is no name
        (b"\x80\x02})" + b"q\1h\1\x86" * 60 + b"K\1s.", "a key that is no text"),  # a hash of 2**60 steps
        (b"\x80\x02}]K\1b.", "a state of something else"),
        (ARRAY.replace(b"DATA", b"J\0\0\x10\0"), "not of bytes"),  # 2**20 zeros
        (ARRAY.replace(b"DATA", b"X\1\0\0\0a"), "not of bytes"),  # a text, which each name of the array would copy
        (ARRAY.replace(b"DATA", b"U\1a").replace(b"u1", b"f8"), "not of bytes"),
        (ARRAY.replace(b"DATA", b"U\1a").replace(b"K\1K\1\x85", b"K\1K\2\x85"), "reshape"),
    ],
)
def test_a_pickle_claims_nothing(monkeypatch: pytest.MonkeyPatch, data: bytes, message: str) -> None:
    monkeypatch.setattr(pickled, "MOST_OPERATIONS", 4000)
    with pytest.raises(ValueError, match=message):
        pickled.values(data)


def test_class_names_of_a_pickle_are_a_list_of_texts() -> None:
    assert pickled.values(ARRAY.replace(b"DATA", b"U\1a"))["a"].tolist() == [97]
    for value in (b"text", 3, [3], [[]], {}, [b"x" * pickled.MOST_TEXT] * 2):
        with pytest.raises(ValueError, match="texts"):
            pickled.texts(value)
    assert pickled.texts([b"a", "b"]) == ["a", "b"]


def nested(depth: int) -> np.ndarray:
    value: np.ndarray = np.zeros(1)
    for _ in range(depth):
        cell = np.empty((1, 1), object)
        cell[0, 0] = value
        value = cell
    return value


def test_a_matlab_file_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    found = matlab.variables(mat({"a": np.arange(6.0).reshape(2, 3), "t": "text", "c": nested(2)}))
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["t"] == "text" and found["c"][0][0].tolist() == [[0]]
    with pytest.raises(ValueError, match="nested too deeply"):
        matlab.variables(mat({"a": nested(9)}))
    with pytest.raises(ValueError, match="version 5"):
        matlab.variables(b"no" * 100)
    whole = mat({"a": np.arange(99)}, packed=False)
    for size in range(128, len(whole)):
        with suppress(ValueError):
            assert "a" not in matlab.variables(whole[:size]), size
    monkeypatch.setattr(matlab, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="unpacks to too many bytes"):
        matlab.variables(mat({"a": np.zeros(1000)}))


def element(kind: int, *data: bytes) -> bytes:
    content = b"".join(data)
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def value(kind: int, *parts: bytes, dims: bytes = b"\1\0\0\0" * 2, name: bytes = b"a") -> bytes:
    return element(14, element(6, bytes([kind]) + bytes(7)), element(5, dims), element(1, name), *parts)


HEADER = bytes(126) + b"IM"
EMPTY = element(14)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(1 << 18), ""),  # 2**15 elements without a type
        (value(6, element(9, bytes(8)), dims=b"\1\1\1\1" * (1 << 20)), "more than 32 dimensions"),
        (value(4, element(4, b"a\0" * (1 << 20))), "texts of more than"),
        (value(4, element(9, bytes(1 << 20))), "a text of other letters"),
        (value(1, name=b"a" * (1 << 20)), "texts of more than"),
        (value(1, EMPTY * (1 << 17)), "more than 1000 values"),
        (value(2, element(5, b"\1\0\0\0"), element(1, b"a" * 5000), EMPTY), "more than 1000 values"),
    ],
)
def test_small_elements_of_a_matlab_file_take_little_memory(
    monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr(matlab, "MOST_VALUES", 1000)
    monkeypatch.setattr(matlab, "MOST_LETTERS", 10000)
    for data in (HEADER + content, HEADER + element(15, zlib.compress(content))):
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=message) if message else nullcontext():
                matlab.variables(data)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(content) + (1 << 20)
        finally:
            tracemalloc.stop()
    with pytest.raises(ValueError, match="more than 1000 values"):
        matlab.variables(HEADER + EMPTY * 1001)


def test_empty_pictures_are_not_counted_by_their_shape_alone(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (folder / name).write_bytes(b"\0\0\x08\2" + struct.pack(">II", (1 << 20) + 1, 0))
    with pytest.raises(UserError, match="1048577 pictures of uint8 and 1048577 labels"):
        load_set(folder)


def test_a_members_name_leads_nowhere(tmp_path: Path) -> None:
    names = "../../away/cat/1.png", "/tmp/dog/1.png", "a/bird/1.png"
    write_tar(tmp_path / "set.tar.gz", [(name, png()) for name in names])
    assert load_set(tmp_path / "set.tar.gz").classnames == ["bird", "cat", "dog"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "set.tar.gz"]
    folder = SETS["vtab/dtd"].write(tmp_path / "set")
    (folder / "labels/test1.txt").write_text("a/../../../../../secret.png\n")
    (tmp_path / "secret.png").write_bytes(png())
    with pytest.raises(UserError, match=r"it has no images/a/\.\./"):
        load_set(folder)


def test_an_archive_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "set.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("cat/1.png", bytes(1 << 20))
        out.writestr("dog/1.png", png())
    monkeypatch.setattr(archives, "MAX_IMAGE_BYTES", 1 << 18)
    images = load_set(tmp_path / "set.zip").images
    with pytest.raises(OSError, match="more than 262144 bytes"):
        images[0].read()
    assert Image.open(io.BytesIO(images[1].read())).size == (5, 6)
    archives.contents.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"its directory has \d+ bytes, more than 46"):
        patch.setattr(archives, "MOST_FILES", 1)
        patch.setattr(zipfile, "ZipFile", None)  # it would read the whole directory
        archives.contents(tmp_path / "set.zip")
    monkeypatch.setattr(tar, "FREE_BYTES", 1000)
    write_tar(tmp_path / "set.tar.gz", [("cat/1.png", bytes(1 << 22))])
    with pytest.raises(UserError, match=r"cannot read .*set\.tar\.gz \(unpacks to more than 200 times its size"):
        load_set(tmp_path / "set.tar.gz")


def test_a_ppm_picture_has_pixels() -> None:
    assert _of_ppm(ppm()).startswith(b"\x89PNG")
    for size in (b"0 6", b"6 0", b"0 0", b"00 00"):
        with pytest.raises(OSError, match="no PPM picture"):
            _of_ppm(b"P6\n" + size + b"\n255\n")


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "password"])
def test_a_damaged_archive_is_one_line(tmp_path: Path, damage: str) -> None:
    path = SETS["gtsrb"].pack(tmp_path / "gtsrb") / "GTSRB_Final_Test_GT.zip"
    data = path.read_bytes()
    locked = data.replace(b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0")
    path.write_bytes({"cut": data[:-30], "empty": b"", "text": b"<html>", "password": locked}[damage])
    message = "needs a password" if damage == "password" else "GT.zip.*; fetch it again"
    with pytest.raises(UserError, match=message) as found:
        load_set(tmp_path / "gtsrb")
    assert "\n" not in str(found.value)


def test_a_folder_of_several_sets_is_refused(tmp_path: Path) -> None:
    for name in ("cifar10", "vtab/cifar100"):
        SETS[name].write(tmp_path / name.rpartition("/")[2])
        SETS[name].pack(tmp_path / "both")
    assert load_set(tmp_path / "cifar10").classnames, "both versions of one set are one set"
    with pytest.raises(
        UserError, match=r"both holds several sets \(cifar10, vtab/cifar100\); give the files of one, or"
    ):
        load_set(tmp_path / "both")
    SETS["cifar10"].pack(tmp_path / "root")
    SETS["mnist"].pack(tmp_path / "root" / "mnist")
    SETS["vtab/svhn"].pack(tmp_path / "root")
    with pytest.raises(UserError, match=r"root holds several sets \(cifar10, mnist, vtab/svhn\)"):
        load_set(tmp_path / "root")
    found = suite_sets("datacomp", str(tmp_path / "root"))
    assert [item.name for item in found] == ["cifar10", "mnist", "vtab/svhn"]


def test_one_of_several_archives_names_their_folder_and_wrong_files_say_what_is_wrong(tmp_path: Path) -> None:
    folder = SETS["vtab/pets"].pack(tmp_path / "pets")
    with pytest.raises(UserError, match=r"is one of images\.tar\.gz, annotations\.tar\.gz; give their folder"):
        load_set(folder / "images.tar.gz")
    for name, file, content, message in (
        ("cifar10", "test_batch.bin", b"\1" * 3000, "reshape"),
        ("stl10", "test_y.bin", b"\1\2", "6 pictures of uint8 and 2 labels"),
        ("mnist", "t10k-labels-idx1-ubyte", b"\0\0\x08\1\0\0\0\x09", "labels-idx1-ubyte is damaged"),
        ("vtab/svhn", "test_32x32.mat", b"", "version 5"),
        ("gtsrb", "GT-final_test.csv", b"Filename;ClassId\n00000.ppm;5;77\n", "78 classes, and gtsrb 43"),
        ("fgvc_aircraft", "data/images_variant_test.txt", b"", "holds no image"),
    ):
        place = SETS[name].write(tmp_path / name)
        (place / file).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_set(place)
