"""The command line: help, presets and overrides, and one clear line for every mistake."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clipscale import __version__
from clipscale.cli import received
from clipscale.cli.compose import once
from clipscale.cli.help import shown
from clipscale.cli.main import main
from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.config.parse import typed
from clipscale.config.presets import composed_defaults, group_options
from clipscale.config.setting import sections, settings_of
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


def test_the_overview_lists_the_verbs_that_exist(cli: Cli) -> None:
    for words in ((), ("--help",), ("-h",), ("help",)):
        status, out, err = cli(*words)
        assert (status, err) == (0, "")
        assert set(VERBS) <= set(out.split())


def test_the_version_is_the_packages_and_completion_has_help(cli: Cli) -> None:
    assert cli("--version") == (0, f"clipscale {__version__}\n", "")
    assert cli("completion", "--help")[0] == 0


def test_trains_help_shows_main_keys_group_choices_and_examples(cli: Cli) -> None:
    status, out, _ = cli("train", "--help")
    assert status == 0
    for word in ("batch", "samples", "epochs", "run", "resume", "data.train", "model.name", "launch.procs"):
        assert f"\n  {word} " in out, f"{word} is not listed"
    for group, choices in group_options().items():
        assert f"{group}=" in out
        assert all(choice in out for choice in choices)
    assert "clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("tool", TOOLS)
def test_help_lists_every_declared_key(cli: Cli, tool: str) -> None:
    """In the help of the tool or, if it has many keys, of a section."""
    settings = TOOLS[tool].settings
    status, out, _ = cli(*tool.split(), "--help")
    assert status == 0
    assert f"Usage: clipscale {tool}" in out and TOOLS[tool].examples.splitlines()[0] in out
    for section in sections(settings):
        status, own, _ = cli(*tool.split(), section, "--help")
        assert status == 0
        assert f"\n  {section}." in own
        out += own
    missing = [key.name for key in settings_of(settings) if f"\n  {key.name} " not in out]
    assert not missing, missing


def test_help_of_a_group_says_what_each_file_is_for(cli: Cli) -> None:
    out = cli("train", "--help", "experiment")[1]
    assert all(f"  experiment={name} " in out for name in group_options()["experiment"])


@pytest.mark.parametrize("verb", ["data", "bench"])
def test_help_of_a_verb_with_tools_is_short_and_names_them_and_their_keys(cli: Cli, verb: str) -> None:
    status, out, _ = cli(verb, "--help")
    assert status == 0
    assert len(out.splitlines()) < 30
    for tool in tools_of(verb):
        assert f"\n  {tool} " in out
        assert all(key.section or key.name in out for key in settings_of(TOOLS[f"{verb} {tool}"].settings))


@pytest.mark.parametrize("tool", [name for name, tool in TOOLS.items() if tool.file])
def test_the_defaults_that_help_shows_are_those_of_a_run(tool: str) -> None:
    values = once(tool, [])
    assert values is not None
    composed = asdict(typed(TOOLS[tool].settings, values))
    of_files = composed_defaults(TOOLS[tool].file)[1]
    assert of_files["precision.name"] == ("bf16" if tool in ("train", "launch", "plan") else "fp32")
    for key in settings_of(TOOLS[tool].settings):
        value: Any = composed
        for part in key.name.split("."):
            value = value[part]
        assert shown(of_files.get(key.name, key.default)) == shown(value), key.name


def test_help_of_a_section_shows_the_defaults_of_a_run_and_the_choices(cli: Cli) -> None:
    assert re.search(r"Choose\s+ieee or tf32\.", cli("train", "--help", "loss")[1])
    assert re.search(r"schedule.warmup +5% ", cli("train", "--help", "schedule")[1])
    assert re.search(r"precision.name +bf16 ", cli("plan", "--help", "precision")[1])


# ---- mistakes ----

MISTAKES = [
    ("tran", "unknown verb 'tran'; did you mean 'train'?; there are train, launch, eval, embed, "),
    ("train model=vit-b33", "model=vit-b33: unknown; choose ... or vit-l14; did you mean 'vit-b32'"),
    ("train modle=vit-b32", "unknown key 'modle'; did you mean 'model'?"),
    ("train optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
    ("train lr=1", "unknown key 'lr'; did you mean 'optim.lr'?"),
    ("train ~optim.lrr", "unknown key 'optim.lrr'"),
    ("train batch=32k,64k", "batch=32k,64k: several values; add -m"),
    ("train data.train=a.tar,b.tar", "data.train=a.tar,b.tar: several values; add -m"),
    ("train batch=[1", "batch=[1: cannot be read"),
    ("train batch 64", "batch: give settings as KEY=VALUE"),
    ("train --multi batch=1k", "--multi: unknown flag; did you mean '--multirun'?"),
    ("train data=demo --cfg", "--cfg needs a value"),
    ("train batch=many data=demo", "batch=many: 'many' is not a count such as 100000, 768k or 1.5M"),
    ("train batch=-4 data=demo", "batch=-4: give at least 1"),
    ("train batch=10 launch.procs=4 data=demo", "batch=10 cannot be shared evenly by launch.procs=4 processes"),
    ("train data.augment.scale=[1,2,3] data.train=x", "data.augment.scale=[1,2,3]: give 2 numbers"),
    ("train data=3", "data=3: unknown; choose default or demo"),
    ("train +model=tiny", "+model: it has a value already; leave out the +"),
    ("train eval=3 data=demo", "eval is a section of settings; give one of its keys: eval."),
    ("train model.architecture=3 data=demo", "model.architecture: give names and values, model.architecture."),
    ("train ~data.train", "~data.train: a setting cannot be taken away; give it another value"),
    ("train =3", "=3: give settings as KEY=VALUE"),
    ("train --cfg=nope data=demo", "--cfg nope: choose job, hydra or all"),
    ("train samples=1k epochs=2 data=demo", "samples=1024 and epochs=2 both set the length"),
    ("train model=tiny", "data.train is not set; give shards"),
    ("train --help modell", "train --help modell: no such section; did you mean 'model'?"),
    ("train -m run=a hydra.sweep.dir=b", "hydra.sweep: name the sweep's folder with run=NAME"),
    ("train -m model=vit-b32,vit-b33", "model=vit-b33: unknown"),
    ("eval", "eval needs run=NAME"),
    ("eval run=nowhere", "run=nowhere: there is no folder runs/nowhere"),
    ("eval -m run=a,b", "eval takes no -m"),
    ("eval rum=a", "unknown key 'rum'; did you mean 'run'?"),
    ("embed data=x.tar", "out is not set; give the folder to write, out=DIR"),
    ("embed data=x.tar out=y", "embed needs run=NAME or run=PATH, or a model"),
    ("embed model=tiny data=x.tar out=y", "data.train='x.tar' matches no shard; ..."),
    ("explore", "explore needs run=NAME or run=PATH, or a model: model=vit-b32 model.weights="),
    ("explore model.weights=a.pt", "data is not set; give a folder of `clipscale embed`, or shards"),
    ("explore run=. model.weights=a.pt", "run=. and model.weights=a.pt are two models; give the second as against="),
    ("explore run=. data=x.tar port=70000", "port=70000: give at most 65535"),
    ("plan", "hardware is not set; give the GPU, hardware=a100-80g, or run=NAME"),
    ("plan hardware=h101-80g", "hardware=h101-80g: unknown; did you mean 'h100-80g'"),
    ("plan hardware=h100-80g batch=100 gpus=8", "batch=100 cannot be shared evenly by gpus=8 x nodes=1; choose"),
    ("plan hardware=h100-80g reserve=5", "reserve=5.0: give at most 1"),
    ("plan hardware=cpu model=tiny gpus=4 cache.chunk=128", "cache.chunk=128: one process holds 64 samples"),
    ("plan hardware=cpu model=tiny cache.keep=lots", "cache.keep=lots: give none, auto, or bytes such as 8G"),
    ("plan hardware=[a]", "hardware=['a']: give one text"),
    ("plan hardware=cpu model=tiny optim.name=nosuch", "optim.name='nosuch' is not one of timm's optimizers"),
    ("plan hardware=cpu model=tiny optim.betas=[1,2]", "optim: adamw refuses its settings (Invalid beta"),
    ("plan run=nowhere", "run=nowhere: there is no runs/nowhere/config.yaml; give the folder of a run that has begun"),
    ("plan run=a batch=32", "run=a: the settings are that run's own; leave out batch=32"),
    ("data", "data: of what; there is demo, index, check, stats, features, as in: clipscale data demo"),
    ("data chekc a.tar", "data chekc: unknown; did you mean 'check'?; there is demo"),
    ("data --help chekc", "data chekc: unknown; did you mean 'check'?; there is demo"),
    ("report --help run", "report --help run: no such section; there are none"),
    ("data check a.tar table=3 table.rows=4", "table is a section of settings; give one of its keys: table."),
    ("data check a.tar table.rows.x=3", "unknown key 'table.rows.x'; did you mean 'table.rows'?"),
    ("data check a.tar allow_pipe=perhaps", "allow_pipe=perhaps: give true or false"),
    ("data stats nowhere.tar", "shards='nowhere.tar' matches no shard; give a tar file, "),
    ("data demo 5000", "data demo 5000: give settings as KEY=VALUE; the keys are root, samples, seed, force"),
    ("report", "report needs run=NAME"),
    ("report run.x=3", "unknown key 'run.x'; did you mean 'run'?"),
    ("export run=none-such", "run=none-such: there is no folder runs/none-such"),
    ("completion csh", "completion: choose bash, zsh, fish; for bash, put  eval "),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_answered_in_one_line_and_with_status_2(cli: Cli, words: str, message: str) -> None:
    status, out, err = cli(*words.split())
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    start, *parts = message.split("...")  # "..." stands for anything
    assert err.startswith(f"error: {start}"), err
    assert all(part in err for part in parts), err


def test_under_torchrun_a_sweep_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = cli("train", "-m", "batch=32k,64k")
    assert status == 2
    assert err.startswith("error: -m under torchrun would start the whole sweep in every rank; leave torchrun out")


# ---- composing ----


def test_the_first_run_of_the_readme_composes_as_typed(cli: Cli) -> None:
    status, out, err = cli(
        "train", "model=vit-l14", "batch=1M", "data.train=/data/laion/{00000..41455}.tar", "--cfg", "job"
    )
    assert (status, err) == (0, "")
    assert "train: /data/laion/{00000..41455}.tar" in out
    assert "name: ViT-L-14" in out


@pytest.mark.parametrize(
    ("typed", "composed"),
    [
        ("data.train=[/a/{0..9}.tar,/b/*.tar]", "  train:\n  - /a/{0..9}.tar\n  - /b/*.tar\n"),
        ("data.train=/a b/it's:{1,2}.tar", "  train: /a b/it's:{1,2}.tar\n"),
        ("data.train='/a,b.tar'", "  train: /a,b.tar\n"),
        ("data.train=null", "  train: null\n"),
        ("data.captions={txt: 0.5, 'json:caption': 0.5}", "captions: '{txt: 0.5, ''json:caption'': 0.5}'\n"),
        ("data.captions=[txt=0.5,json:caption=0.5]", "captions:\n  - txt=0.5\n  - json:caption=0.5\n"),
        ("data.filter.fields=[similarity>=0.3,LANGUAGE=en|de]", "    - similarity>=0.3\n    - LANGUAGE=en|de\n"),
        ("data.templates=[a photo of a {}.]", "templates:\n  - a photo of a {}.\n"),
    ],
)
def test_addresses_captions_and_conditions_are_taken_literally(cli: Cli, typed: str, composed: str) -> None:
    status, out, err = cli("train", typed, "--cfg", "job")
    assert (status, err) == (0, "")
    assert composed in out


def test_a_command_composes_its_configuration_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, compose = [], received.Loader.load_configuration
    counted = lambda *given, **named: composed.append(1) or compose(*given, **named)  # noqa: E731
    monkeypatch.setattr(received.Loader, "load_configuration", counted)
    assert cli("plan", "hardware=none")[0] == 2
    assert len(composed) == 1


def test_hydras_own_settings_resolve(cli: Cli) -> None:
    status, out, err = cli("train", "--cfg", "hydra", "--resolve", "data.train=x")
    assert (status, err) == (0, "")
    assert "name: train" in out


def test_samples_replace_epochs_and_epochs_replace_samples(cli: Cli) -> None:
    assert "samples: 5k\nepochs: null\n" in cli("train", "samples=5k", "--cfg", "job")[1]
    assert "samples: null\nepochs: 3\n" in cli("train", "experiment=demo", "epochs=3", "--cfg", "job")[1]


def test_free_form_options_take_new_keys_without_a_plus(cli: Cli) -> None:
    assert "options:\n  foreach: true\n" in cli("train", "optim.options.foreach=true", "--cfg", "job", "-p", "optim")[1]


def test_config_dir_adds_experiments(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbatch: 4k\n")
    out = cli("train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job")[1]
    assert out.startswith("batch: 4k\n")
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptim:\n  lrr: 1\n")
    status, _, err = cli("train", "--config-dir", str(tmp_path), "experiment=mine", "data.train=x.tar")
    assert (status, err) == (2, "error: unknown key 'optim.lrr'; did you mean 'optim.lr'?\n")


def test_nothing_is_written_by_composing(cli: Cli, tmp_path: Path) -> None:
    cli("train", "data=demo", "--cfg", "job")
    cli("train", "model=vit-b33")
    assert list(tmp_path.iterdir()) == []


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

    status, out, err = cli("eval", "run=first", f"eval.sets={classification_set(tmp_path / 'colours')}", "device=cpu")
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
    assert all((tmp_path / line).stat().st_size for line in out.splitlines())


def test_an_unwritable_run_folder_ends_the_run_with_one_line(cli: Cli, shards: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    status, _, err = cli("train", *TINY, f"data.train={shards}", "run=./taken/run", "launch.procs=1")
    assert status == 2
    assert err.startswith("error: run=taken/run cannot be written"), err
    assert err.count("\n") == 1
