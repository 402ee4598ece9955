"""The demo set is deterministic to the byte, in LAION's and CLIP_benchmark's layouts, and its held-out data stays held
out."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from threading import Timer

import pytest

from clipscale.cli import train_verb
from clipscale.cli.main import main
from clipscale.data.sample import RawSample
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.tools.data import demo, scenes
from clipscale.tools.data.demo_folder import train_shards, user_folder
from tests.conftest import Capture
from tests.support.runs import ten_step_config
from tests.support.user_errors import refused


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small held-out sets, for what depends on no number of pictures."""
    for name in ("OBJECTS_PER_CLASS", "UNSEEN_PER_CLASS"):
        monkeypatch.setattr(demo, name, 1)
    monkeypatch.setattr(demo, "RETRIEVAL_IMAGES", 8)


@pytest.fixture(scope="module", name="root")
def shared(demo: Path) -> Path:
    return demo


def samples(path: Path | str) -> Iterator[RawSample]:
    problem = ReadFailure()
    yield from read_shard(str(path), problem)
    assert problem.reason is None, problem


def train(root: Path) -> list[RawSample]:
    return [s for url in expand(train_shards(root)) for s in samples(url)]


def digests(root: Path) -> dict:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_bytes_are_always_the_same(few: None, tmp_path: Path) -> None:
    for processes in (1, 2):
        demo.render_demo(tmp_path / str(processes), 64, processes)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_leaves_neither_a_folder_nor_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: int, status: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "cores", lambda: 2)
    of_other_tests = multiprocessing.active_children()
    Timer(2, os.kill, (os.getpid(), number)).start()
    assert main(["data", "demo"]) == status
    assert capsys.readouterr().err.startswith("stopped")
    assert not [*(tmp_path / "clipscale").iterdir()]
    end = time.monotonic() + 60  # the pool's thread reaps its processes; until it has, they count as alive here
    while set(multiprocessing.active_children()) - set(of_other_tests):
        assert time.monotonic() < end, "a process goes on"
        time.sleep(0.05)


def test_training_renders_the_set_that_is_missing(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    render = demo.render_demo
    monkeypatch.setattr(demo, "render_demo", lambda root, processes: render(root, 64))
    monkeypatch.setattr("clipscale.launch.local.launch", lambda *given, **options: {})
    root = user_folder()
    train_verb.main(ten_step_config(root, tmp_path / "run"))
    assert len(expand(train_shards(root))) == 16 and tmp_path in root.parents
    before = digests(root)
    demo.main()
    assert digests(root) == before and str(root) in capsys.readouterr().out


def test_no_training_scene_holds_an_unseen_combination(root: Path) -> None:
    captions = "\n".join(json.loads(s.members["json"])["caption"].lower() for s in train(root))
    assert {pair for pair in scenes.CLASSES if " ".join(pair) in captions} == set(scenes.SEEN)


def held_out(root: Path, name: str) -> list[RawSample]:
    folder = root / name
    assert (folder / "test" / "nshards.txt").read_text().strip() == "1"
    return list(samples(folder / "test" / "0.tar"))


@pytest.mark.parametrize(("name", "held"), [("objects", scenes.SEEN), ("unseen", scenes.UNSEEN)])
def test_classification_sets_are_in_clip_benchmarks_layout(
    root: Path, name: str, held: tuple[tuple[str, str], ...]
) -> None:
    folder = root / name
    names = (folder / "classnames.txt").read_text().splitlines()
    templates = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert len(names) == len(set(names)) == len(scenes.CLASSES) >= 24 and all("{c}" in t for t in templates)
    labels = Counter(names[int(s.members["cls"])] for s in held_out(root, name))
    assert set(labels) == {f"{colour} {shape}" for colour, shape in held}
    assert len(set(labels.values())) == 1, "classes are balanced"


def test_retrieval_images_have_several_captions_that_fit_no_other(root: Path) -> None:
    assert (root / "retrieval" / "dataset_type.txt").read_text().strip() == "retrieval"
    captions = [s.members["txt"].decode().splitlines() for s in held_out(root, "retrieval")]
    assert len(captions) == 500
    assert all(len(lines) == len(set(lines)) == 5 for lines in captions)
    plain = Counter(line for lines in captions for line in {line.lower().rstrip(".") for line in lines})
    assert max(plain.values()) == 1, f"{plain.most_common(3)} describe several images"


def test_other_folders_are_left_alone(few: None, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for root in (foreign, foreign / "thesis.tex" / "below"):
        with refused(r"demo set cannot be written: .*foreign"):
            demo.render_demo(root, 64)
    assert [path.name for path in tmp_path.rglob("*")] == ["foreign", "thesis.tex"], "no temporary folder is left"
    assert (foreign / "thesis.tex").read_text() == "years of work"
