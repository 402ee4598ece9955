"""The command line: help, presets and overrides, and one clear line for every mistake."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clipscale.cli.main import main
from clipscale.cli.verbs import VERBS
from clipscale.config.presets import group_options
from clipscale.config.setting import nested, settings_of
from tests.conftest import TINY, Command
from tests.eval.sets import classification_set

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("train", ...)`: exit status, stdout and stderr of a command, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(words)
        out, err = capsys.readouterr()
        return status, out, err

    return run


# ---- help ----


@pytest.mark.parametrize(
    ("words", "listed"), [("", [*VERBS]), ("--help", [*VERBS]), ("data -h", [name for name in VERBS if " " in name])]
)
def test_the_overview_lists_the_verbs_that_begin_with_the_words(cli: Cli, words: str, listed: list[str]) -> None:
    status, out, err = cli(*words.split())
    assert (status, err) == (0, "")
    assert re.findall(r"^  (\w+(?: \w+)?)  +(?=\S.*\n)", out.partition("Examples")[0], re.M) == listed


@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_every_declared_key(cli: Cli, verb: str) -> None:
    """In the help of the verb or of a section."""
    settings = VERBS[verb].settings
    status, out, _ = cli(*verb.split(), "--help")
    assert status == 0
    assert f"Usage: clipscale {verb}" in out and VERBS[verb].examples.splitlines()[0] in out
    if nested(settings):
        out += cli(*verb.split(), *nested(settings), "--help")[1]
    assert max(map(len, out.splitlines())) <= 130
    missing = [key.name for key in settings_of(settings) if f"\n  {key.name} " not in out]
    assert not missing, missing


def test_help_shows_groups_with_their_defaults_and_what_each_preset_is_for(cli: Cli) -> None:
    out = cli("train", "--help")[1]
    for group, choices in group_options().items():
        assert f"{group}=" in out and all(choice in out for choice in choices)
    assert "vit-b32*" in out and out == cli("help", "train")[1]
    out = cli("train", "--help", "experiment")[1]
    assert all(f"  experiment={name} " in out for name in group_options()["experiment"])
    assert re.search(r"schedule.warmup +5% ", cli("train", "--help", "schedule")[1]), "the default of conf/"


# ---- mistakes ----

MISTAKES = [
    ("tran", "unknown verb 'tran'; did you mean 'train'?; there are train, eval, embed, "),
    ("train model=vit-b33", "model=vit-b33: unknown; choose ... or vit-l14; did you mean 'vit-b32'"),
    ("train optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
    ("train lr=1", "unknown key 'lr'; did you mean 'optim.lr'?"),
    ("train batch=32k,64k", "batch=32k,64k: several values; add -m"),
    ("train batch=[1", "batch=[1: cannot be read"),
    ("train batch 64", "batch: give settings as KEY=VALUE"),
    ("train --multi batch=1k", "unrecognized arguments: --multi"),
    ("train data=demo --cfg", "argument --cfg: expected one argument"),
    ("train batch=10 launch.procs=4 data=demo", "batch=10 cannot be shared evenly by launch.procs=4 processes"),
    ("train data=mine", "data=mine: unknown; choose default or demo"),
    ("train samples=1k epochs=2 data=demo", "samples=1024 and epochs=2.0: give the length of the run with one of them"),
    ("train model=tiny", "data.train is not set; give shards"),
    ("train data.train=/nowhere/{0..3}.tar", "data.train='/nowhere/{0..3}.tar' matches no shard"),
    ("train data=demo resume=nowhere", "resume=nowhere: there is no such file or run folder"),
    ("train data.train=${oc.env:CLIPSCALE_NOT_SET}", "${oc.env:CLIPSCALE_NOT_SET}: the environment variable "),
    ("train --help modell", "train --help modell: no such section; did you mean 'model'?"),
    ("train -m model=vit-b32,vit-b33 data=demo", "model=vit-b33: unknown"),
    ("train -m batch=32,many data=demo", "batch=many: 'many' is not a count"),
    ("train batch=64 batch=128", "batch is given twice; quote a value with braces, which the shell splits"),
    ("train data.train=/d/0.tar data.train=/d/1.tar", "data.train is given twice; quote a value with braces"),
    ("data check a.tar data.order=auto data.order=epochs", "data.order is given twice"),
    ("train batch=64,", "batch=64,: nothing follows the comma; leave it out"),
    ("train --batch-size 64", "unrecognized arguments: --batch-size; give settings as KEY=VALUE, batch="),
    ("train --train-data x.tar", "unrecognized arguments: --train-data; give settings as KEY=VALUE, data.train="),
    ("train --model ViT-B-32", "unrecognized arguments: --model; give settings as KEY=VALUE, model="),
    ("train model=ViT-L-14", "model=ViT-L-14: unknown; choose ...; did you mean 'vit-l14'"),
    ("train precision=amp", "precision=amp: unknown; choose ...; did you mean 'fp16'"),
    ("train learning_rate=1", "unknown key 'learning_rate'; did you mean 'optim.lr'?"),
    ("train train_data=x.tar", "unknown key 'train_data'; did you mean 'data.train'?"),
    ("train gpus=8", "unknown key 'gpus'; did you mean 'launch.procs'?"),
    ("train data=x.tar loss.objective=sigmoid", "loss.objective=sigmoid needs its scale and bias: take loss=siglip"),
    ("eval", "run is not set; give run=NAME"),
    ("eval run=nowhere", "run=nowhere: there is no folder runs/nowhere"),
    ("eval -m run=a,b", "eval takes no -m"),
    ("eval rum=a", "unknown key 'rum'; did you mean 'run'?"),
    ("embed data=x.tar", "out is not set; give the folder to write, out=DIR"),
    ("embed data=x.tar out=y", "run is not set; give run=NAME or run=PATH, or model="),
    ("explore data=x.tar", "run is not set; give run=NAME or run=PATH, or model="),
    ("plan", "hardware is not set; give the GPU, hardware=a100-80g, or run=NAME"),
    ("plan hardware=h101-80g", "hardware=h101-80g: unknown; did you mean 'h100-80g'"),
    ("plan hardware=h100-80g batch=100 gpus=8", "batch=100 cannot be shared evenly by gpus=8 x nodes=1; choose"),
    ("plan hardware=cpu model=tiny cache.keep=lots", "cache.keep=lots: give none, auto, or bytes such as 8G"),
    ("plan hardware=cpu loss.objective=sigmoid", "loss.objective=sigmoid needs its scale and bias: take loss=siglip"),
    ("plan hardware=cpu model=tiny batch=16 cache.chunk=17", "cache.chunk=17: one process holds 16 samples of the"),
    ("plan run=nowhere", "run=nowhere: there is no folder runs/nowhere"),
    ("data", "unknown verb 'data'; did you mean 'data demo'... there are train, eval, "),
    ("data chekc a.tar", "unknown verb 'data chekc'; did you mean 'data check'?"),
    ("data check a.tar data.workrs=2", "unknown key 'data.workrs'; did you mean 'data.workers'"),
    ("data index nowhere.tar", "shards='nowhere.tar' matches no shard; give a tar file, "),
    ("data demo 5000", "5000: give settings as KEY=VALUE"),
    ("report", "run is not set; give run=NAME"),
    ("export run=none-such", "run=none-such: there is no folder runs/none-such"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_answered_in_one_line_and_with_status_2(cli: Cli, words: str, message: str) -> None:
    status, out, err = cli(*words.split())
    assert status == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    start, *parts = message.split("...")  # "..." stands for anything
    assert err.startswith(f"error: {start}"), err
    assert all(part in err for part in parts), err


def tiny(*words: str) -> list[str]:
    """The words of a small run, with others in place of some."""
    keys = {word.partition("=")[0] for word in words}
    return ["train", *(word for word in TINY if word.partition("=")[0] not in keys), *words]


REFUSED = [
    ("loss.backend=triton", "loss.backend=triton needs a GPU"),
    ("device=cuda", "device=cuda: torch sees no CUDA device here"),
    ("data.augment.jitter=[.3,.3,.3,.8]", "data.augment.jitter: its last, the hue, is 0.8; give 0.5 or less"),
    ("optim.name=adamww", "optim.name='adamww' is not one of timm's optimizers; did you mean 'adamw'"),
    ("cache.chunk=17", "cache.chunk=17: one process holds 16 samples of the batch"),
    ("log=wandb", "log=wandb: there is no key; run `wandb login`"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has both")
@pytest.mark.parametrize(("word", "message"), REFUSED)
def test_what_this_machine_cannot_do_is_refused_before_a_model_is_built(
    cli: Cli, shards: str, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.setattr("clipscale.state.train_state.build_model", pytest.fail)
    monkeypatch.setattr("wandb.login", lambda **options: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    status, _, err = cli(*tiny(f"data.train={shards}", word))
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith(f"error: {message}")


def test_a_long_warm_up_gives_a_line_and_a_finished_run_keeps_its_settings(
    cli: Cli, shards: str, tmp_path: Path
) -> None:
    words = tiny(f"data.train={shards}", "run=a", "schedule.warmup=9")
    status, _, err = cli(*words)
    assert status == 0 and "warning: schedule.warmup=9 covers all 2 steps of the run; give a share" in err
    written = [(tmp_path / "runs/a" / name).read_bytes() for name in ("config.yaml", "env.json", "metrics.jsonl")]
    status, out, _ = cli(*words, "optim.lr=1")
    assert status == 0 and "nothing is left to train" in out
    assert written == [
        (tmp_path / "runs/a" / name).read_bytes() for name in ("config.yaml", "env.json", "metrics.jsonl")
    ]


def test_under_torchrun_a_sweep_and_a_run_without_a_name_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli("train", "-m", "batch=32k,64k")[2].startswith("error: -m under torchrun would start the whole sweep")
    assert cli("train", "data=demo")[2].startswith("error: run is not set; under torchrun all ranks need the same name")


def test_help_and_mistakes_need_no_torch() -> None:
    commands = [words.split() for words, _ in MISTAKES if words.startswith(("train", "plan", "report", "eval"))]
    commands = [["train", "--help"], *(words for words in commands if "model=tiny" not in words)]
    code = f"import sys; from clipscale.cli.main import main; [main(words) for words in {commands!r}]"
    code += "; sys.exit(bool({'torch', 'open_clip', 'torchvision', 'timm'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- composing ----


@pytest.mark.parametrize(
    ("typed", "composed"),
    [
        ("data.train=/data/laion/{00000..41455}.tar", "  train:\n  - /data/laion/{00000..41455}.tar\n"),
        ("data=/data/laion/{00000..41455}.tar", "  train:\n  - /data/laion/{00000..41455}.tar\n"),
        ("data.train=[/a/{0..9}.tar,/b/*.tar]", "  train:\n  - /a/{0..9}.tar\n  - /b/*.tar\n"),
        ("data.train=/a b/it's:{1,2}.tar", "  train:\n  - /a b/it's:{1,2}.tar\n"),
        ("data.train='/a,b.tar'", "  train:\n  - /a,b.tar\n"),
        ("data.train=null", "  train: null\n"),
        ("data.captions=[txt=0.5,json:caption=0.5]", "captions:\n  - txt=0.5\n  - json:caption=0.5\n"),
        ("data.filter.fields=[similarity>=0.3,LANGUAGE=en|de]", "    - similarity>=0.3\n    - LANGUAGE=en|de\n"),
        ("model=vit-l14", "name: ViT-L-14"),
        ("optim.options.foreach=true", "options:\n    foreach: true\n"),
        ("samples=5k", "samples: 5120\nepochs: null\n"),
    ],
)
def test_a_word_composes_as_typed(cli: Cli, tmp_path: Path, typed: str, composed: str) -> None:
    status, out, err = cli("train", typed, "--cfg", "job")
    assert (status, err) == (0, "")
    assert composed in out
    assert list(tmp_path.iterdir()) == [], "nothing is written by composing"


def test_config_dir_adds_experiments(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbatch: 4k\n")
    out = cli("train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job")[1]
    assert out.startswith("batch: 4096\n")
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptim:\n  lrr: 1\n")
    status, _, err = cli("train", "--config-dir", str(tmp_path), "experiment=mine", "data.train=x.tar")
    assert (status, err) == (2, "error: unknown key 'optim.lrr'; did you mean 'optim.lr'?\n")


# ---- a run ----


def test_train_eval_plan_and_report_work_one_after_another(
    command: Command, cli: Cli, shards: str, tmp_path: Path
) -> None:
    done = command("train", *TINY, f"data.train={shards}", "run=first", "launch.procs=1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "done: runs/first (step 2, loss " in done.stdout
    assert (tmp_path / "runs/first/config.yaml").is_file()
    assert len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]

    colours = f"eval.sets={classification_set(tmp_path / 'colours')}"
    status, out, err = cli("eval", "run=first", colours, "device=cpu", "log.progress=false")
    assert status == 0, err
    assert "colours" in out
    assert (tmp_path / "runs/first/eval").is_dir()

    status, out, err = cli("plan", "run=first", "json=true")
    assert status == 0, err
    host = json.loads(out)["compared"]["host"]
    assert host["ratio"] == pytest.approx(1, abs=0.15), host  # of a process that only trains

    status, out, err = cli("report", "run=first")
    assert status == 0, err
    assert [Path(line).name for line in out.splitlines()] == ["report.html", "report.png"]


def test_an_unwritable_run_folder_ends_the_run_with_one_line(cli: Cli, shards: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    status, _, err = cli("train", *TINY, f"data.train={shards}", "run=./taken/run", "launch.procs=1")
    assert status == 2
    assert err.startswith("error: run=taken/run cannot be written"), err
    assert err.count("\n") == 1
