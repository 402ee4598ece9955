"""Every verb over damaged run folders, states, weights, sets, tables, indexes and demands: status 0, 1 or 2, one line, no traceback.

The ordinary suite draws a few cases of each kind, the slow test many. CASES=N draws other numbers, FIRST=SEED other cases.
"""

import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from clipscale import checkpoint
from clipscale.cli.main import main
from clipscale.data.shards.access import user_cache
from tests.data.files import sample, write_shards, write_tar
from tests.eval import sets
from tests.security.damage import BYTES, WRONG, damaged
from tests.security.limits import address_space

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
MOST_S, MOST_BYTES = 60.0, 2 << 30


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
    "pretrained": Kind(
        "weights",
        ("*",),
        lambda copy, base: (
            *TRAIN,
            "samples=8",
            f"data.train={base}/shards/*.tar",
            f"run={copy}-new",
            f"model.pretrained={copy}/w.pt",
        ),
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


class Watch:
    """What a command does beside its work, by Python's audit events: it starts programs, connects, or writes outside its folders."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self.hear)  # for the rest of the process: Python has no way to take it back

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.on:
            return
        if event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect") or (
            event == "subprocess.Popen" and Path(str(arguments[0])).name not in PROGRAMS
        ):
            self.seen.append(f"{event} {arguments[:2]}")
        elif event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int):
            path = os.path.realpath(arguments[0])
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not path.startswith(WRITABLE):
                self.seen.append(f"writes {path}")


PROGRAMS = ("git", "uname", "ldconfig", "nvidia-smi")
"""What `env.json` and torch ask."""
WRITABLE = (tempfile.gettempdir(), str(user_cache()), "/dev/", "/proc/")
WATCH = Watch()


def peak_bytes() -> int:
    """The most memory of this process since it was last asked, or now where the kernel does not say."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak


REFUSED_MEMORY = re.compile(r"MemoryError|[Oo]ut of memory|alloc", re.ASCII)
"""How Python, numpy, torch, pyarrow and the system call memory that RLIMIT_AS has refused."""


def attempt(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Run one command; what is wrong with how it ended, or nothing."""
    began = time.monotonic()
    peak_bytes()
    before = psutil.Process().memory_info().rss
    WATCH.seen.clear()
    WATCH.on = True
    try:
        with address_space(MOST_BYTES):
            status = main(list(words))
    except BaseException as error:
        frames, trace = [], error.__traceback__
        while trace:
            frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
            trace = trace.tb_next
        return f"{type(error).__name__}: {str(error)[:100]!r} at {' '.join(frames[-4:])}"
    finally:
        WATCH.on = False
        shown = capsys.readouterr()
    lines = shown.err.strip("\n").split("\n")
    taken, grown = time.monotonic() - began, peak_bytes() - before
    if status not in (0, 1, 2) or "Traceback" in shown.err + shown.out:
        return f"status {status}: {shown.err[-300:]}"
    if status == 2 and (not lines[-1].startswith("error: ") or sum(line.startswith("error: ") for line in lines) != 1):
        return f"not one line: {shown.err[-300:]!r}"
    if not all(line.isprintable() for line in lines):
        return f"not printable: {shown.err[-300:]!r}"
    if REFUSED_MEMORY.search(shown.err):
        return f"asked for more than {MOST_BYTES} bytes: {shown.err[-300:]!r}"
    if WATCH.seen:
        return f"did {WATCH.seen}"
    if taken > MOST_S or grown > MOST_BYTES:
        return f"took {taken:.0f} s and {grown >> 20} MiB"
    return ""


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
    assert not failures(name, 3, base, tmp_path, capsys)


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
