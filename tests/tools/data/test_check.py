"""`data check` prints what is broken, by the reasons that training counts."""

import json
from pathlib import Path

from clipscale.cli.main import main
from tests.conftest import Capture
from tests.data.files import HUGE, picture, sample, write_shards, write_tar
from tests.data.streams import ids, open_stream

DIRTY = [*sample("good"), ("text.txt", b"no picture"), ("bare.png", picture())]
DIRTY += [("noise.png", b"\x89PNG noise"), ("noise.txt", b"x"), ("latin.png", picture()), ("latin.txt", b"caf\xe9")]
DIRTY += [("large.png", HUGE), ("large.txt", b"x"), ("hollow.png", b""), ("hollow.txt", b"x")]


def table(capsys: Capture) -> dict[str, list[str]]:
    """The printed rows by their first cell."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    return {words[0]: words[1:] for words in lines}


def test_a_sound_set_has_status_zero(tmp_path: Path, capsys: Capture) -> None:
    write_shards(tmp_path, [5, 4])
    assert main(["data", "check", str(tmp_path)]) == 0
    rows = table(capsys)
    assert (rows["samples"][0], rows["usable"], len(rows)) == ("9", ["9"], 2)


def test_broken_samples_have_the_reasons_that_training_counts(tmp_path: Path, capsys: Capture) -> None:
    write_tar(tmp_path / "0.tar", DIRTY)
    assert main(["data", "check", str(tmp_path)]) == 1
    rows = table(capsys)
    stream = open_stream(tmp_path, batch=1)
    ids(stream, 3)
    assert {name: words[0] for name, words in rows.items() if name in stream.broken} == dict.fromkeys(
        stream.broken, "1"
    )
    assert len(stream.broken) == 6 and rows["usable"] == ["1"]
    assert rows["no_image"][1] == "0.tar/text:"


def test_a_shard_that_cannot_be_read_to_its_end_is_named(tmp_path: Path, capsys: Capture) -> None:
    whole, cut = write_shards(tmp_path, [8, 8])
    cut.write_bytes(cut.read_bytes()[:4300])
    assert main(["data", "check", str(whole), str(cut)]) == 1
    out = "".join(capsys.readouterr().out.split())
    assert f"damagedshard{cut}truncated_shard" in out


def test_a_shard_without_a_usable_sample_says_what_it_holds(tmp_path: Path, capsys: Capture) -> None:
    path = write_tar(tmp_path / "0.tar", [("a.img", b"content"), ("a.cap", b"content")])
    assert main(["data", "check", str(path)]) == 1
    assert ".cap and .img" in " ".join(capsys.readouterr().out.split())


def test_captions_in_the_json_of_samples_without_a_text_are_named(tmp_path: Path, capsys: Capture) -> None:
    """Fields of texts and of lists of texts are named, if they can be typed."""
    fields = {"caption": "a bird", "more": ["", "two birds"], "width": 20, "none": " ", "a,b": "text", "url": "x.de"}
    broken = [
        ("b.txt", b"no picture"),
        ("c.png", picture()),
        ("d.png", picture()),
        ("d.json", json.dumps(fields).encode()),
    ]
    write_tar(tmp_path / "0.tar", [*sample("a"), *broken])
    assert main(["data", "check", str(tmp_path)]) == 1
    row = " ".join(table(capsys)["no_caption"])
    assert "0.tar/c: no_caption; 'data.captions=[txt,json:KEY]' takes captions" in row
    assert row.endswith("its text keys are caption, more, url")


def test_pictures_behind_a_further_dot_are_counted_and_named(tmp_path: Path, capsys: Capture) -> None:
    """They are counted beside a pair that is read, too. Other members with dots are no pictures."""
    names = [*(f"IMG{n}.2024" for n in range(3)), *(f"shoe.{n}" for n in range(5)), "a.1"]
    lost = [member for name in names[:8] for member in ((f"{name}.PNG", picture()), (f"{name}.txt", b"words"))]
    beside = [*sample("a"), ("a.1.png", picture()), ("a.1.txt", b"words"), ("a.mask.npy", b"")]
    write_tar(tmp_path / "0.tar", [*sample("good"), *lost, *beside])
    assert main(["data", "check", str(tmp_path)]) == 1
    rows = table(capsys)
    assert (rows["samples"][0], rows["usable"], rows["dot_in_key"][0]) == ("6", ["2"], "4")
    assert rows["pictures"][:3] == ["not", "read", "9"], "the pairs are those usable and these"
    assert "no_caption" not in rows
    line = " ".join(rows["dot_in_key"])
    assert "0.tar/IMG0" in line and ".2024.png, .2024.txt" in line and "first dot" in line, line


def test_filtered_samples_are_counted_and_not_broken(tmp_path: Path, capsys: Capture) -> None:
    write_shards(tmp_path, [6])
    words = ["data.filter=[side>=5,similarity>=0.3]"]
    assert main(["data", "check", str(tmp_path), *words]) == 0
    assert table(capsys)["filter_no_similarity"][0] == "6"
