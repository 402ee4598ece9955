"""Nothing is written through a link that lies in a received folder, whatever its name."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from clipscale import checkpoint
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.config.sections import LogConfig, ModelConfig
from clipscale.config.tools import EmbedConfig, ExportSettings
from clipscale.data.shards import scan
from clipscale.data.shards.access import Access
from clipscale.data.shards.store import Store
from clipscale.embed import run as embed
from clipscale.eval.examples import gallery
from clipscale.eval.results import save_results
from clipscale.eval.sets.item import EvalSet, ImageRef
from clipscale.export.verb import main as export
from clipscale.launch.run_lock import RunLock
from clipscale.models.towers import build_model
from clipscale.report.metrics import MetricLog
from clipscale.report.page import write_report
from clipscale.step import chunk_sizes as autotune
from tests.data.files import picture, write_shards
from tests.data.shards.web import Web, serving
from tests.export.test_open_clip import ARCHITECTURE
from tests.support.audit import heard

THEIRS = "not to be touched"
MODEL = ModelConfig("own", ARCHITECTURE)


def index(folder: Path) -> None:
    scan.update_indexes([str(path) for path in folder.glob("*.tar")], force=True)


def features(folder: Path) -> None:
    data = DataConfig(train=[str(write_shards(folder.parent / "shards", [2])[0])])
    embed.embed(
        EmbedConfig(
            format="webdataset", features="image", out=str(folder), model=MODEL, data=data, device="cpu", threads=1
        )
    )


def metrics(folder: Path) -> None:
    with MetricLog(folder, LogConfig(progress=False, tensorboard=True), resolved_config="a: 1\n") as log:
        log.step({"step": 1, "loss": 1.0})


def report(folder: Path) -> None:
    with patch("clipscale.report.plots.draw", return_value=Figure(figsize=(1, 1))):  # the plots take a second
        write_report(folder)


def lock(folder: Path) -> None:
    held = RunLock(folder)
    held.enter()
    held.release()


def save(folder: Path) -> None:
    checkpoint.save(folder, 1, {"a": torch.zeros(1)}, keep=1)
    checkpoint.save_diverged(folder, 1, {"a": torch.zeros(1)})
    autotune.save_chunk_sizes(folder, {"image": 1})


def evaluation(folder: Path) -> None:
    save_results(folder, 1, {"set": {"top1": 0.5}}, seconds=1.0)
    image = folder.parent / "image.png"
    image.write_bytes(picture())
    item = EvalSet("set", folder, "retrieval", [ImageRef(image)], captions=["a"], owner=[0])
    gallery(1, item, torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, dtype=torch.bool)).save(folder)


def exported(folder: Path) -> None:
    if not (folder / "checkpoints").exists():
        state: Any = {"model": build_model(MODEL).state_dict(), "model_config": asdict(MODEL)}
        checkpoint.save(folder, 7, state, keep=1)
    export(ExportSettings(run=str(folder)))


WRITERS: list[Callable[[Path], None]] = [index, metrics, report, lock, save, evaluation]
SLOW: list[Callable[[Path], None]] = [features, exported]


@contextmanager
def written() -> Iterator[list[str]]:
    """The paths opened for writing meanwhile."""
    opened = list[str]()

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[0], str) and isinstance(values[2], int):
            opened.extend([values[0]] if values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else [])

    with heard(note):
        yield opened


def names_of(write: Callable[[Path], None]) -> list[str]:
    """Every name that a stranger can know before: files that are there afterwards, and those opened by a fixed name."""
    with TemporaryDirectory() as place, written() as opened:
        folder = prepared(Path(place), write)
        given = {path.name for path in folder.iterdir()}
        write(folder)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        found |= {str(Path(path).relative_to(folder)) for path in opened if path.startswith(f"{folder}/")}
    found |= {".clipscale-index.sqlite.draft", ".clipscale-index.sqlite.draft-journal"} if write is index else set()
    return sorted(name for name in found if name not in given and not files._TEMPORARY.match(Path(name).name))


def prepared(place: Path, write: Callable[[Path], None]) -> Path:
    folder = place / "folder"
    if write is index:
        write_shards(folder, [3], sized=False)
    folder.mkdir(exist_ok=True)
    if write is report:
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    return folder


def plant(folder: Path, name: str, kind: str, victim: Path) -> None:
    """A link at a name, unless something is there, or a link above it."""
    path = folder / name
    with suppress(OSError):
        if files.inner_folder(folder, *Path(name).parts[:-1]) and os.path.lexists(path):
            return
        if kind == "hard":
            path.hardlink_to(victim / "file")
        else:
            path.symlink_to({"file": victim / "file", "dangling": victim / "new", "folder": victim}[kind])


@pytest.mark.parametrize("write", [*WRITERS, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_no_link_in_a_received_folder_is_followed(write: Callable[[Path], None]) -> None:
    names = names_of(write)
    assert len(names) > 1, names

    @settings(max_examples=12, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        with TemporaryDirectory() as place:
            folder, victim = prepared(Path(place), write), Path(place) / "victim"
            victim.mkdir()
            (victim / "file").write_text(THEIRS)
            chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            for name in chosen:
                plant(folder, name, data.draw(st.sampled_from(["file", "dangling", "folder", "hard"])), victim)
            with suppress(UserError, OSError):
                write(folder)
            assert [path.name for path in victim.iterdir()] == ["file"], f"{chosen}: a file was made outside"
            assert (victim / "file").read_text() == THEIRS, chosen

    holds()


@settings(max_examples=12, database=None)
@given(data=st.data())
def test_no_link_in_a_received_cache_is_followed(data: st.DataObject) -> None:
    with TemporaryDirectory() as place, serving(Web(Path(place) / "remote")) as web:
        (path,) = write_shards(Path(place) / "remote", [3])
        whole, url, victim = path.read_bytes(), f"{web.url}/{path.name}", Path(place) / "victim"
        victim.mkdir()
        (victim / "file").write_text(THEIRS)
        Store(Access(str(Path(place) / "known"), 10**6)).open(url).stream.close()
        (copy,) = (path for path in (Path(place) / "known/shards").iterdir() if path.name != ".lock")
        names = ["shards", "shards/.lock", f"shards/{copy.name}", f"shards/.{copy.name}.part", "shards/.x.part"]
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        kinds = ["file", "dangling", "folder", "hard"]
        for name in chosen:
            # a whole copy that came with the cache is what the cache holds, so no hard link there
            plant(
                Path(place) / "cache",
                name,
                data.draw(st.sampled_from(kinds[: 3 if name.endswith("tar") else 4])),
                victim,
            )
        with suppress(OSError):
            stream = Store(Access(str(Path(place) / "cache"), 10**6)).open(url).stream
            assert stream.read() == whole, chosen
            stream.close()
        assert [path.name for path in victim.iterdir()] == ["file"], f"{chosen}: a file was made outside"
        assert (victim / "file").read_text() == THEIRS, chosen
