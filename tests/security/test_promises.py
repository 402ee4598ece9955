"""What docs/security.md promises, where no test of a module shows it; and that every test in its table exists."""

import gzip
import io
import json
import re
import resource
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from clipscale.cli.main import main
from clipscale.config.presets import PACKAGE
from clipscale.config.secrets import without_secrets
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.picture import Picture
from clipscale.data.sample import BrokenSampleError
from clipscale.data.tokenizer import tokenizer_of
from tests.conftest import TINY, Capture
from tests.data.files import picture, write_tar
from tests.support.audit import heard
from tests.support.interpreter import interpreted


def test_every_row_has_its_test() -> None:
    text = (PACKAGE.parent / "docs/security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= text.count("\n| ") - 1, "one test a row"
    missing = [name for file, name in named if f"def {name}(" not in (PACKAGE.parent / file).read_text()]
    assert not missing, missing


@pytest.mark.parametrize("source", ["{pipe}", "@{list}"])
def test_no_shard_is_a_command(tmp_path: Path, capsys: Capture, source: str) -> None:
    pipe = f"pipe:touch {tmp_path}/ran; cat {write_tar(tmp_path / 'a.tar', [('a.png', picture()), ('a.txt', b'a')])}"
    (tmp_path / "list").write_text(pipe)
    assert main(["data", "check", source.format(pipe=pipe, list=tmp_path / "list")]) == 2
    assert "'pipe:touch" in capsys.readouterr().err and not (tmp_path / "ran").exists()


def test_names_and_links_in_an_archive_are_no_paths(tmp_path: Path, capsys: Capture) -> None:
    """The sample that a link should fill has no picture. No file beside the shard is opened or made."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture())
    link = tarfile.TarInfo("b.png")
    link.type, link.linkname = tarfile.SYMTYPE, str(secret)
    climbing = [
        ("../../c.png", picture()),
        ("../../c.txt", b"c"),
        (f"{tmp_path}/d.png", picture()),
        (f"{tmp_path}/d.txt", b"d"),
    ]
    shard = str(write_tar(tmp_path / "a.tar", [link, ("b.txt", b"b"), *climbing]))
    touched = []

    def listen(event: str, given: tuple[object, ...]) -> None:
        if event == "open" and str(given[0]).startswith(str(tmp_path)):
            touched.append(str(given[0]))

    with heard(listen):
        assert main(["data", "check", shard]) == 1
    out = capsys.readouterr().out
    assert re.search(r"samples +3", out) and re.search(r"usable +2", out) and re.search(r"link +1", out), out
    assert set(touched) <= {shard}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "secret.png"]


@pytest.mark.parametrize(
    ("packed", "expected"),
    [(False, "{'too_large': 2} "), (True, "{} truncated_shard: unpacks to over 100 times its size")],
)
def test_a_member_and_a_packed_shard_cost_bounded_memory(tmp_path: Path, packed: bool, expected: str) -> None:
    """256 MiB of zeros as a picture, and as many as a caption; packed into two megabytes."""
    shard = tmp_path / "a.tar"
    pack: Callable[[bytes], bytes] = partial(gzip.compress, compresslevel=1) if packed else bytes
    zeros = pack(bytes(1 << 24))
    with shard.open("wb") as file:
        for name in ("a.png", "b.txt"):
            header = tarfile.TarInfo(name)
            header.size = 1 << 28
            file.write(pack(header.tobuf()))
            for _ in range(1 << 4):
                file.write(zeros)
        file.write(pack(bytes(1024)))
    code = f"""
import resource
from clipscale.config.data import DataConfig
from clipscale.tools.data.check import check_shard
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
findings = check_shard({str(shard)!r}, DataConfig())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, dict(findings.broken), findings.damage)
"""
    done = interpreted(code)
    grown, _, line = done.stdout.strip("\n").partition(" ")
    assert line == expected
    assert int(grown) < 1 << 7, f"{grown} MiB"


def test_a_huge_picture_is_refused_by_its_header_and_before_it_is_resized() -> None:
    file = io.BytesIO()
    Image.new("1", (1 << 14, 1 << 14)).save(file, "PNG")  # 2^28 pixels in a few kilobytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (Picture.read, EvalTransform(224)):
        with pytest.raises(BrokenSampleError, match="pixels") as caught:
            read(file.getvalue())
        assert caught.value.reason == "huge_image"
    narrow = io.BytesIO()
    Image.new("RGB", (1, 1 << 14)).save(narrow, "PNG")  # its shorter side becomes 224
    with pytest.raises(BrokenSampleError, match="pixels"):
        EvalTransform(224)(narrow.getvalue())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17, "KiB"


def test_a_long_caption_is_cut_before_it_is_tokenised() -> None:
    started = time.process_time()
    tokens = tokenizer_of("ViT-B-32", {"context_length": 77})(["a" * (1 << 20), "a photo " + " " * (1 << 20) + "of it"])
    assert tokens.shape == torch.Size([2, 77])
    assert time.process_time() - started < 10


def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: str, capsys: Capture) -> None:
    monkeypatch.setenv("CLIPSCALE_ENV_READ", "")
    monkeypatch.setenv("SECRET_SHARDS", shards)
    words = [
        *TINY,
        "data.train=${oc.env:SECRET_SHARDS}",
        f"run={tmp_path}/run",
        "data.captions=[txt,https://me:pass@host/x]",
    ]
    assert main(["train", *words]) == 0
    written = [
        path.read_text() for path in (tmp_path / "run").glob("*.*") if path.suffix in (".yaml", ".json", ".jsonl")
    ]
    assert len(written) >= 3 and not any(shards in text or "me:pass" in text for text in written)
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["data"]["train"] == ["${oc.env:SECRET_SHARDS}"] and config["data"]["captions"] == [
        "txt",
        "https://host/x",
    ]
    config["eval"]["sets"] = ["${oc.env:SECRET_SHARDS}"]  # as in a folder that somebody sent
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert main(["eval", f"run={tmp_path}/run"]) == 2
    assert "eval.sets: ${oc.env:SECRET_SHARDS} does not exist" in capsys.readouterr().err
    assert without_secrets(json.loads(json.dumps({"a": [f"see {shards}", 3]}))) == {
        "a": ["see ${oc.env:SECRET_SHARDS}", 3]
    }
    assert main(["train", *TINY, f"data.train={shards}", "resume=https://me:pass@host/x"]) == 2
    assert "resume=https://host/x" in capsys.readouterr().err
