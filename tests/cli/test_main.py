"""The command line: help, presets and overrides, and one clear line for every mistake."""

import os
import re
import runpy
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from clipscale import __version__
from clipscale.cli.main import main
from clipscale.cli.verbs import VERBS
from clipscale.common import files
from clipscale.common.errors import LoaderError, StoppedError, UnreachableError, UserError
from clipscale.config.presets import group_options
from clipscale.config.setting import differences, sections_of, settings_of
from clipscale.config.stages import STAGE_SETTINGS
from clipscale.config.train_config import TrainConfig
from tests.cli.conftest import Cli, tiny
from tests.conftest import TINY
from tests.eval.sets import classification_set
from tests.support.forked_processes import forks
from tests.support.terminals import on_terminal, screen

# ---- help ----


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        ("", [*VERBS]),
        ("--help", [*VERBS]),
        ("data", [name for name in VERBS if " " in name]),
        ("data -h", [name for name in VERBS if " " in name]),
    ],
)
def test_the_overview_lists_the_verbs_that_begin_with_the_words(cli: Cli, words: str, listed: list[str]) -> None:
    status, out, err = cli(*words.split())
    assert (status, err) == (0, "")
    assert re.findall(r"^  (\w+(?: \w+)?)  +(?=\S.*\n)", out.partition("Examples")[0], re.M) == listed


@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_every_declared_key(cli: Cli, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is in the help of the verb or of one of its sections."""
    monkeypatch.setenv("COLUMNS", "120")
    settings = VERBS[verb].settings
    status, out, _ = cli(*verb.split(), "--help")
    assert status == 0
    assert f"Usage: clipscale {verb}" in out and VERBS[verb].examples.splitlines()[0] in out
    if sections := sections_of(settings):
        out += cli(*verb.split(), *sections, "--help")[1]
    assert max(map(len, out.splitlines())) <= 130
    missing = [key for key in settings_of(settings) if f"\n  {key} " not in out]
    assert not missing, missing


def test_help_shows_groups_with_their_defaults_and_what_each_preset_is_for(cli: Cli) -> None:
    out = cli("train", "--help")[1]
    for group, choices in group_options().items():
        assert f"{group}=" in out and all(choice in out for choice in choices)
    assert "vit-b32*" in out
    out = cli("train", "--help", "experiment")[1]
    assert all(f"  experiment={name} " in out for name in group_options()["experiment"])
    assert re.search(r"schedule.warmup +5% ", cli("train", "--help", "schedule")[1]), "the default of conf/"
    assert re.fullmatch(r"  optim.lr +0.0005 +Peak .*\n", cli("train", "--help", "optim.lr")[1]), "one setting"
    stages = " ".join(cli("train", "--help", "stages")[1].split())
    assert all(key in stages for key in STAGE_SETTINGS) and re.findall("samples, (.*), lr", stages) == [
        ", ".join([*STAGE_SETTINGS][1:5])
    ]


def test_a_finished_run_is_answered_from_its_folder_and_keeps_its_settings(
    cli: Cli, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's warm-up covers all of it, which makes a warning."""
    sets = f"eval.sets={classification_set(tmp_path / 'colours')}"
    words = tiny(f"data.train={shards}", "run=a", sets, "schedule.warmup=9")
    status, _, err = cli(*words)
    assert status == 0 and "warning: schedule.warmup=9 covers all 2 steps of the run; give a share" in err
    kept = [tmp_path / "runs/a" / name for name in ("config.yaml", "env.json", "metrics.jsonl")]
    written = [path.read_bytes() for path in kept]
    status, out, _ = cli(*words, "optim.lr=1")
    assert status == 0 and "nothing is left to train" in out
    assert [path.read_bytes() for path in kept] == written
    run = files.read_yaml(kept[0])
    run["model"] |= {"preprocess": {"mean": [0.5, 0.5, 0.5]}, "correct_cls_mask": True}  # as weights complete it
    kept[0].write_text(yaml.safe_dump(run, sort_keys=False))
    monkeypatch.setattr("clipscale.launch.local.launch", lambda *given, **options: pytest.fail("it starts again"))
    status, out, err = cli(*words, "log.every=7")
    assert (status, err) == (0, "") and "run=runs/a is complete at step 2" in out and "colours" in out
    with pytest.raises(pytest.fail.Exception, match="it starts again"):
        cli(*words, "seed=1")
    with pytest.raises(pytest.fail.Exception, match="it starts again"):
        cli(*words, "model.init_scale=20")
    (tmp_path / "runs/a/result.json").unlink()
    with pytest.raises(pytest.fail.Exception, match="it starts again"):
        cli(*words)


def test_a_finished_run_is_evaluated_and_copied_elsewhere_once(
    cli: Cli, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tiny(f"data.train={shards}", "run=a")
    assert cli(*words)[0] == 0
    trained = (tmp_path / "runs/a/metrics.jsonl").read_bytes()
    settings = files.read_yaml(tmp_path / "runs/a/config.yaml")
    words += [f"eval.sets={classification_set(tmp_path / 'colours')}", f"checkpoint.copy={tmp_path / 'copy'}"]
    assert cli(*words, "optim.lr=1")[0] == 0
    copied = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert {"checkpoints/step_00000002/meta.json", "result.json", "metrics.jsonl"} <= copied
    assert (tmp_path / "copy/metrics.jsonl").read_bytes() == trained
    noted = files.read_yaml(tmp_path / "runs/a/config.yaml")
    assert {*differences(settings, noted)} == {"eval.sets", "checkpoint.copy"}
    monkeypatch.setattr("clipscale.launch.local.launch", lambda *given, **options: pytest.fail("it starts again"))
    status, out, _ = cli(*words)
    assert status == 0 and "run=runs/a is complete at step 2" in out and "colours" in out


# ---- composing ----


@pytest.mark.usefixtures("hydra_itself")
@pytest.mark.parametrize(("typed", "composed"), files.read_yaml(Path(__file__).with_name("composed.yaml")).items())
def test_a_word_composes_as_typed(cli: Cli, tmp_path: Path, typed: str, composed: str) -> None:
    _, out, _ = cli("train", typed, "--cfg", "job")  # then the same checks as at a start: there is no such data
    assert composed in out
    assert list(tmp_path.iterdir()) == [], "nothing is written by composing"


# These take the path of the first.
OTHERS = [("model=vit-b32", "model=tiny"), ("data.train=/a", "data.train=b.tar"), ("run=one", "run=other")]


@pytest.mark.usefixtures("hydra_itself")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("samples=1k", "samples=768"), ("data.captions=[txt]", "data.captions=[json:a]"),
        ("data=a.tar batch=2", "data=b.tar"),
        *(pytest.param(*words, marks=pytest.mark.slow) for words in OTHERS),
    ],
)  # fmt: skip
def test_of_a_value_given_twice_the_last_counts_with_a_line(cli: Cli, before: str, after: str) -> None:
    """Hydra does the same, so that words typed after a script's words count."""
    _, out, err = cli("train", *before.split(), after, "--cfg", "job")
    _, alone, silent = cli("train", *(word for word in before.split() if word[:3] == "bat"), after, "--cfg", "job")
    assert out == alone
    assert after.partition("=")[2] in err and err.count("\n") == silent.count("\n") + 1


@pytest.mark.usefixtures("hydra_itself")
def test_a_folder_is_data_by_its_bare_name_unless_a_preset_has_it(cli: Cli, tmp_path: Path) -> None:
    for name in ("mine", "demo"):
        (tmp_path / name).mkdir()
    assert "  train:\n  - mine\n" in cli("train", "data=mine", "--cfg", "job")[1]
    assert "  - demo\n" not in cli("train", "data=demo", "--cfg", "job")[1]


@pytest.mark.usefixtures("hydra_itself")
def test_config_dir_adds_experiments(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbatch: 4k\n")
    out = cli("train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job")[1]
    assert "\nbatch: 4096\n" in out
    (tmp_path / "experiment" / "copy.yaml").write_text(cli("train", "experiment=demo", "batch=64", "--cfg", "job")[1])
    copied = cli("train", "--config-dir", str(tmp_path), "experiment=copy", "--cfg", "job")
    assert copied == cli("train", "experiment=demo", "batch=64", "--cfg", "job")
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptim:\n  lrr: 1\n")
    status, _, err = cli("train", "--config-dir", str(tmp_path), "experiment=mine", "data.train=x.tar")
    assert (status, err) == (2, "error: unknown key 'optim.lrr'; did you mean 'optim.lr'?\n")


# ---- a run ----


def test_train_eval_and_report_work_one_after_another(cli: Cli, shards: str, tmp_path: Path) -> None:
    colours = f"eval.sets={classification_set(tmp_path / 'colours')}"
    status, out, err = cli(*tiny(f"data.train={shards}", "run=first", "launch.procs=1", "plan=true", colours))
    assert status == 0, err
    assert "done: runs/first (step 2, loss " in out
    assert (tmp_path / "runs/first/config.yaml").is_file()
    assert len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["colours", "runs"]

    status, out, err = cli("eval", "run=first", colours, "device=cpu")
    assert status == 0, err
    assert "colours" in out
    assert (tmp_path / "runs/first/eval").is_dir()

    status, out, err = cli("report", "first")
    assert status == 0, err
    assert [Path(line).name for line in out.splitlines()] == ["report.html"]


WATCHED = """\
import sys
from clipscale.__main__ import main
class Watching:
    def find_spec(self, name, *_):
        if name in ("hydra", "torch", "wandb"):
            print(f"<{name}>", file=sys.stderr)
sys.meta_path.insert(0, Watching())
sys.exit(main())
"""


@pytest.mark.slow
def test_a_terminal_has_a_word_before_every_wait_and_ctrl_c_is_no_error(
    tmp_path: Path, shards: str, environment: dict
) -> None:
    """The first step always has a line. Lines fit, and begin with the time of day. timm does not get to import wandb,
    whose folders in TMPDIR a killed run would leave.

    Ctrl-C is typed when that line has ended: a terminal forgets what nobody has read yet.
    """
    kept = [word for word in TINY if not word.startswith("samples")]
    words = ["train", *kept, f"data.train={shards}", "run=a", "samples=1M", "log.every=1000"]
    status, output = on_terminal(
        [sys.executable, "-c", WATCHED, *words], tmp_path, environment, (r" step=1 .*\n", "\x03")
    )
    order = [output.find(word) for word in ("the settings", "<hydra>", "torch ...", "<torch>", "building")]
    assert order == sorted(order) and order[0] >= 0 and "<wandb>" not in output, output
    *lines, last, end = [line for line in screen(output) if not line.startswith("<")]
    assert re.fullmatch(r"stopped after step \d+ and saved; the same command resumes it", last), lines
    assert (status, end) == (130, "")
    assert any(" step=1 loss=" in line for line in lines)
    # The terminal writes ^C itself, before or after our message, which then leaves an empty line.
    timed = [line for line in lines if line and not re.search(r"[\^-]C", line)]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in timed), lines
    first = next(line for line in timed if " ..." not in line)
    assert re.search(r" training \w+: [\d,]+ steps of \d+ pairs", first), timed
    assert max(map(len, lines)) <= 100, lines


@pytest.mark.parametrize(("words", "way"), [("run=a", "the same command resumes it"), ("resume=none", "run=runs/2")])
def test_a_stopped_run_says_how_it_goes_on(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, shards: str, words: str, way: str
) -> None:
    """If the same command would begin another run, or be refused, the line has the run's name."""

    def stopped(config: TrainConfig, main: object, **_: object) -> None:
        (Path(config.run) / "checkpoints/step_00000003").mkdir(parents=True)
        raise StoppedError("stopped after step 3 and saved", signal.SIGINT)

    monkeypatch.setattr("clipscale.launch.local.launch", stopped)
    status, _, err = cli(*tiny(f"data.train={shards}", words))
    assert status == 130 and err.startswith("stopped after step 3 and saved; ") and way in err


@pytest.mark.parametrize(("writes", "status"), [(True, 0), (False, 143)])
def test_a_signal_after_the_result_was_written_leaves_a_complete_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, shards: str, tmp_path: Path, writes: bool, status: int
) -> None:
    """A result that an earlier start left in the folder does not make the run complete."""
    file = tmp_path / "runs/a/result.json"
    file.parent.mkdir(parents=True)
    files.write_json(file, {"run": "runs/a", "step": 1, "loss": 1.0, "eval": {}})
    os.utime(file, (1, 1))

    def stopped(config: TrainConfig, main: object, **_: object) -> None:
        if writes:
            files.write_json(file, {"run": "runs/a", "step": 2, "loss": 1.0, "eval": {}})
        raise StoppedError("stopped by SIGTERM", signal.SIGTERM)

    (file.parent / "run.lock").touch()
    monkeypatch.setattr("clipscale.launch.local.launch", stopped)
    assert cli(*tiny(f"data.train={shards}", "run=a"))[0] == status


def without_output(*commands: list[str]) -> None:
    """The output fails: the disk is full, the reader has gone, or the encoding lacks a letter."""
    read, gone = os.pipe()
    os.close(read)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    os.dup2(gone, 2)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = os.fdopen(number, "w", encoding="ascii")
        vars(sys).update({name: stream, f"__{name}__": stream})
    for words in commands:
        status = main(words)
        sys.stdout.flush()  # as at the end of a program
        assert status == 0, words


def test_no_output_ends_what_writes_files(shards: str, tmp_path: Path) -> None:
    run = f"run={tmp_path}/ü"
    process = forks().Process(target=without_output, args=(tiny(f"data.train={shards}", run), ["export", run]))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "ü/result.json").is_file() and [*tmp_path.rglob("open_clip_config.json")]


# ---- before and beside the verbs ----


@pytest.mark.parametrize(("error", "status"), [(UserError, 2), (LoaderError, 1), (UnreachableError, 1)])
def test_what_may_succeed_later_is_no_mistake(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: type[UserError], status: int
) -> None:
    """Launchers start the command again after a status of 1, and not after 2."""
    monkeypatch.setattr("clipscale.tools.report.page.main", Mock(side_effect=error("why")))
    assert cli("report", "a")[::2] == (status, "error: why\n")


def test_shared_memory_that_cannot_be_written_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.common.limits.SHARED_MEMORY", "/proc/gone")
    monkeypatch.setattr("clipscale.tools.report.page.main", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert cli("report", "a")[2].startswith("error: /proc/gone cannot be written")
    monkeypatch.setattr("clipscale.common.limits.SHARED_MEMORY", "/dev")
    monkeypatch.setattr("clipscale.common.limits.MIN_SHARED_BYTES", 2**60)
    monkeypatch.setattr("clipscale.tools.report.page.main", Mock(side_effect=OSError(28, "No space left on device")))
    assert cli("report", "a")[2].startswith("error: /dev is full")


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["version"]])
def test_the_version_is_printed(cli: Cli, words: list[str]) -> None:
    assert cli(*words) == (0, f"clipscale {__version__}\n", "")


@pytest.mark.parametrize(
    "words", ["train help", "help train", "help train help", "train -m --help", "train data=demo -m --help"]
)
def test_help_is_found_by_any_of_its_words(cli: Cli, words: str) -> None:
    assert cli(*words.split()) == cli("train", "--help")


def test_timm_finds_no_wandb_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm would load it for a function that nothing here calls. That takes a second, and makes folders in TMPDIR."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    del sys.modules["wandb"]  # it comes back as it was
    monkeypatch.delitem(sys.modules, "timm.utils.summary", raising=False)
    runpy.run_module("clipscale.__main__")
    assert not hasattr(import_module("timm.utils.summary"), "wandb")


# ---- the variables that torch reads when it is loaded ----


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("UNUSED", "passive 0 expandable_segments:True"),
        ("OMP_PROC_BIND", "None None expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "passive 0 None"),
    ],
)
def test_threads_sleep_and_segments_grow_unless_the_user_has_set_them(setting: str, values: str) -> None:
    """The command line sets this before torch is loaded, for itself and for the processes it starts."""
    code = "import os, sys, clipscale.cli.main as cli; cli.main(['--version']); "
    code += "print('torch' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    command = [sys.executable, "-c", code, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF"]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), setting: ""}
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == f"False {values}"
