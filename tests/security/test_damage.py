"""Every verb over damaged run folders, states, weights, sets, tables, indexes and demands: status 0, 1 or 2, one line, no traceback.

The ordinary suite draws a few cases of each kind, the slow test many. CASES=N draws other numbers, FIRST=SEED other cases.
"""

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from clipscale import checkpoint
from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.train import Run
from tests.data.files import sample, write_shards, write_tar
from tests.eval import sets
from tests.security import pipelines
from tests.security.attempts import attempt
from tests.security.damage import BYTES, WRONG, damaged

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]

SMALL = (
    "{embed_dim:8,vision_cfg:{image_size:16,layers:1,width:8,head_width:8,patch_size:8},"
    "text_cfg:{context_length:16,vocab_size:49408,width:8,heads:1,layers:1}}"
)
TRAIN = (
    "train",
    "model=tiny",
    f"model.architecture={SMALL}",
    "precision=fp32",
    "batch=8",
    "cache.chunk=8",
    "schedule.warmup=0",
    "data.workers=0",
    "device=cpu",
    "log.progress=false",
    "log.tensorboard=false",
)


@dataclass(frozen=True)
class Kind:
    """A folder that is damaged in one file, and what is done with it."""

    folder: str
    files: tuple[str, ...]
    """Patterns of the files that may be damaged."""
    words: Callable[[Path, Path], tuple[str, ...]]
    """The command line, from the damaged copy and the whole base."""
    slow: bool = False
    """It takes over a second a case."""


LONG = ("cache.chunk=4", "checkpoint.within_step=1e-9", "cache.keep=none")
"""Settings of a run that saves its progress at every chunk of a step."""


def new_run(copy: Path, base: Path) -> tuple[str, ...]:
    return *TRAIN, "samples=8", f"data.train={base}/shards/*.tar", f"run={copy}-new"


def pipeline(file: Path) -> tuple[str, ...]:
    """The setting of the pipeline, and where it reads."""
    os.environ[pipelines.SAMPLES] = str(file)
    return f"data.pipeline={pipelines.__name__}:samples", "data.shard_streams=1"


RUN = (
    "config.yaml",
    "env.json",
    "metrics.jsonl",
    "chunks.json",
    "run.lock",
    "eval/*.json",
    "eval/retrieved/*",
    "checkpoints/*2/*",
)
STATE = ("checkpoints/*2/*",)
TEST_SET = ("*.txt", "test/*", "*.json", "images/*")
KINDS = {
    "report": Kind("run", RUN[:-1], lambda copy, base: ("report", f"run={copy}"), slow=True),
    "plan": Kind("run", RUN[:-1], lambda copy, base: ("plan", f"run={copy}"), slow=True),
    "eval a run": Kind("run", RUN, lambda copy, base: ("eval", f"run={copy}", "device=cpu")),
    "eval a state": Kind(
        "run", STATE, lambda copy, base: ("eval", f"run={copy}", "device=cpu", f"eval.sets=[{base}/ret]")
    ),
    "export": Kind("run", STATE, lambda copy, base: ("export", f"run={copy}")),
    "resume": Kind(
        "run",
        RUN,
        lambda copy, base: (*TRAIN, "samples=32", f"data.train={base}/shards/*.tar", f"run={copy}"),
        slow=True,
    ),
    "resume=PATH": Kind(
        "run",
        STATE,
        lambda copy, base: (
            *TRAIN,
            "samples=32",
            f"data.train={base}/shards/*.tar",
            f"run={copy}-new",
            f"resume={copy}/checkpoints/step_00000002",
        ),
        slow=True,
    ),
    "resume within a step": Kind(
        "long",
        ("checkpoints/*.within/*",),
        lambda copy, base: (*TRAIN, *LONG, "samples=16", f"data.train={base}/shards/*.tar", f"run={copy}"),
        slow=True,
    ),
    "model.weights, file": Kind(
        "weights",
        ("w.pt",),
        lambda copy, base: (*new_run(copy, base), f"model.weights={copy}/w.pt"),
    ),
    "model.weights, run": Kind(
        "run",
        STATE,
        lambda copy, base: (*new_run(copy, base), f"model.weights={copy}"),
        slow=True,
    ),
    "model.weights, folder": Kind(
        "exported",
        ("*.json", "*.safetensors"),
        lambda copy, base: ("eval", f"model.weights={copy}", "device=cpu", f"eval.sets=[{base}/ret]"),
        slow=True,
    ),
    "data.pipeline": Kind(
        "samples",
        ("*.json",),
        lambda copy, base: (*TRAIN, "samples=8", f"run={copy}-new", *pipeline(copy / "s.json")),
        slow=True,
    ),
    "eval.sets, shards": Kind(
        "ret", TEST_SET, lambda copy, base: ("eval", f"run={base}/run", "device=cpu", f"eval.sets=[{copy}]")
    ),
    "eval.sets, classes": Kind(
        "cls", TEST_SET, lambda copy, base: ("eval", f"run={base}/run", "device=cpu", f"eval.sets=[{copy}]")
    ),
    "eval.sets, JSON": Kind(
        "kar", TEST_SET, lambda copy, base: ("eval", f"run={base}/run", "device=cpu", f"eval.sets=[{copy}]")
    ),
    "data stats": Kind("shards", ("*",), lambda copy, base: ("data", "stats", f"{copy}/*.tar")),
    "data check": Kind(
        "shards", ("*",), lambda copy, base: ("data", "check", f"{copy}/*.tar", "workers=1", f"out={copy}-out")
    ),
    "data index": Kind("shards", ("*", ".*"), lambda copy, base: ("data", "index", f"{copy}/*.tar", "workers=1")),
    "table": Kind(
        "table",
        ("*.csv", "*.parquet"),
        lambda copy, base: ("data", "check", f"{copy}/t.csv", "workers=1", f"out={copy}-out"),
    ),
    "Parquet": Kind(
        "table",
        ("*.parquet",),
        lambda copy, base: ("data", "check", f"{copy}/t.parquet", "workers=1", f"out={copy}-out"),
    ),
    "list": Kind(
        "table",
        ("list.txt",),
        lambda copy, base: ("data", "check", f"@{copy}/list.txt", "workers=1", f"out={copy}-out"),
    ),
    "experiment": Kind(
        "conf", ("*/*.yaml",), lambda copy, base: ("plan", "--config-dir", str(copy), "experiment=mine", "hardware=cpu")
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with its states and results, weights, evaluation sets, indexed shards, tables and an experiment."""
    import torch

    root = tmp_path_factory.mktemp("base")
    shards = write_shards(root / "shards", [12, 12])
    sets.classification_set(root / "cls")
    sets.retrieval_set(root / "ret")
    sets.karpathy_json(root / "kar")
    words = (
        f"data.train={root}/shards/*.tar",
        f"run={root}/run",
        "checkpoint.every=1",
        "checkpoint.keep=0",
        "eval.every=1",
    )
    assert main([*TRAIN, "samples=16", *words, f"eval.sets=[{root}/cls,{root}/ret]"]) == 0
    assert main(["data", "index", f"{root}/shards/*.tar", "workers=1"]) == 0
    (root / "weights").mkdir()
    state = checkpoint.load(checkpoint.locate(root / "run", "latest"))
    torch.save(
        {name.replace("image.encoder", "visual"): value for name, value in state["model"].items()},
        root / "weights/w.pt",
    )
    assert main(["export", f"run={root}/run", f"out={root}/exported"]) == 0
    (root / "samples").mkdir()
    members = [dict(sample(f"{n}", seed=n)) for n in range(8)]
    pipelines.written(
        root / "samples/s.json", [{name.split(".")[1]: data for name, data in one.items()} for one in members]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "before_chunk", dying_at(6, Run.before_chunk))
        main([*TRAIN, *LONG, "samples=16", f"data.train={root}/shards/*.tar", f"run={root}/long"])
    assert list((root / "long").glob("checkpoints/*.within/*"))
    (root / "table").mkdir()
    (root / "table/list.txt").write_text(f"# shards\n{shards[0]}\n{root}/shards/{{00000..00001}}.tar\n")
    rows = [(f"{root}/kar/images/{name}.png", f"all {name}") for name in sets.NAMES]
    (root / "table/t.csv").write_text("filepath,caption\n" + "".join(f"{path},{text}\n" for path, text in rows))
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(
        pyarrow.table({"filepath": [p for p, _ in rows], "caption": [t for _, t in rows]}), root / "table/t.parquet"
    )
    (root / "conf/experiment").mkdir(parents=True)
    (root / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: tiny\nbatch: 16\nsamples: 32\n"
    )
    return root


def dying_at(call: int, inner: Callable[[Run], None]) -> Callable[[Run], None]:
    """`inner`, which fails when it is called once more than that."""
    left = [call]

    def before_chunk(run: Run) -> None:
        inner(run)
        left[0] -= 1
        if left[0] < 0:
            raise UserError("killed")

    return before_chunk


def case(kind: Kind, seed: int, base: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Damage a copy and use it."""
    rng, copy = random.Random(seed), place / "copy"
    for path in place.glob("copy*"):
        shutil.rmtree(path)
    shutil.copytree(base / kind.folder, copy, copy_function=os.link)
    candidates = sorted(
        {path for pattern in kind.files for path in copy.glob(pattern) if path.is_file() and "lock" not in path.suffix}
    )
    for path in copy.rglob("*"):  # what a run writes must not reach the base through the links
        if path.is_file() and "checkpoints" not in path.parts:
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
    chosen = rng.choice(candidates)
    data = damaged(chosen.name, chosen.read_bytes(), rng)
    chosen.unlink()
    chosen.write_bytes(data)
    with contextlib.chdir(place):  # an evaluation without a run writes to runs/
        wrong = attempt(kind.words(copy, base), capsys)
    return wrong and f"seed {seed}, {chosen.relative_to(copy)}: {wrong}"


def failures(name: str, count: int, base: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    first = int(os.environ.get("FIRST", "0"))
    found = [
        case(KINDS[name], seed, base, place, capsys)
        for seed in range(first, first + int(os.environ.get("CASES", count)))
    ]
    return list(filter(None, found))


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.slow])
def test_a_damaged_file_is_one_line(name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not failures(name, 2, base, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_files_are_one_line_each(
    name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = failures(name, 40, base, tmp_path, capsys)
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)


VERBS = (
    *("train", "eval", "plan", "report", "export", "doctor", "completion"),
    *("data", "data check", "data index", "data stats", "bench loss"),
)
KEYS = (
    *(
        "run",
        "batch",
        "samples",
        "checkpoint",
        "eval.sets",
        "data.pipeline",
        "model.weights",
        "data.train",
        "model.architecture",
        "seed",
        "out",
        "hardware",
    ),
    *(
        "precision",
        "filter.fields",
        "captions",
        "experiment",
        "model",
        "resume",
        "table.rows",
        "cache.chunk",
        "ramp.start",
    ),
)
VALUES = (
    *map(str, WRONG),
    *(
        "1e400",
        "-1",
        "{",
        "[",
        "${x}",
        "${oc.env:X}",
        "{0..99999}",
        "../..",
        "/dev/null",
        "\0",
        "a=b",
        "'",
        '"',
        "~",
        "null",
    ),
)


def demand(rng: random.Random) -> tuple[str, ...]:
    """A verb, and settings that nobody would give."""
    words = [
        f"{rng.choice(['', '', '', '+', '++', '~'])}{rng.choice(KEYS)}={rng.choice(VALUES)}"
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    loose = [rng.choice(VALUES)] if rng.random() < 0.2 else []
    return (*rng.choice(VERBS).split(), *words, *loose, "device=nowhere")


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_a_demand_is_answered_in_one_line(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`device=nowhere` keeps a demand that happens to be valid from being carried out."""
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for seed in range(count):
        words = demand(random.Random(seed))
        if problem := attempt(words, capsys):
            wrong[words] = problem
    assert not wrong, f"{len(wrong)} demands:\n" + "\n".join(f"{words}: {problem}" for words, problem in wrong.items())


def test_the_generator_damages(tmp_path: Path) -> None:
    """Each kind of damage changes what it is given."""
    data = b'{"a": [1, 2, {"b": "text"}], "c": 1.5}'
    for damage in BYTES:
        assert any(damage(data, random.Random(seed)) != data for seed in range(5))
    assert len({damaged("x.json", data, random.Random(seed)) for seed in range(60)}) > 40


def test_names_of_any_bytes_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards and members whose names are no UTF-8, or hold escape sequences, newlines or markup."""
    monkeypatch.chdir(tmp_path)
    keys = ("a\udcff\x1b]0;x\x07", "b\n[red]", "c")
    members = [(name.replace("KEY", key), data) for key in keys for name, data in sample("KEY")]
    members[4] = (members[4][0], b"\xff")
    write_tar(tmp_path / "0.tar", members)
    write_tar(tmp_path / os.fsdecode(b"\xff\x1b[31m.tar"), members[:7])
    for verb in ("check", "index", "stats"):
        assert not attempt(("data", verb, str(tmp_path), *(["workers=1"] if verb != "stats" else [])), capsys)
    words = (f"data.train={tmp_path}", f"run={tmp_path}/run", "samples=8")
    assert not attempt((*TRAIN, *words), capsys)
