"""Words of open_clip and of earlier versions that are not settings: the answer to each, and the page about them."""

import re
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from clipscale.cli.compose import compose_settings
from clipscale.cli.sweep import jobs
from clipscale.cli.verbs import VERBS, split_verb
from clipscale.cli.words import overrides_of, parse_flags
from clipscale.common.errors import UserError
from clipscale.config.parse import ABSENT, ALIASES, accepted_value, unknown_key
from clipscale.config.presets import default_choices, group_options
from clipscale.config.setting import settings_of
from clipscale.config.train_config import TrainConfig
from tests.support.user_errors import refused

pytestmark = pytest.mark.usefixtures("hydra_itself")

PAGE = (Path(__file__).parents[2] / "docs/howto/open-clip.md").read_text(encoding="utf-8")
SETTINGS = settings_of(TrainConfig)
KNOWN = {*SETTINGS, *group_options()}


@pytest.fixture(scope="module")
def flags() -> list[str]:
    """All flags of open_clip's training, as its own parser has them."""
    params = pytest.importorskip("open_clip_train.params")
    parsers: list[ArgumentParser] = []

    def stopped(parser: ArgumentParser, words: Any = None, namespace: Any = None) -> None:
        parsers.append(parser)
        raise StopIteration

    with pytest.MonkeyPatch.context() as patch, suppress(StopIteration):
        patch.setattr(ArgumentParser, "parse_args", stopped)
        params.parse_args([])
    found = re.findall(r"--[\w-]+", parsers[0].format_usage())
    assert len(found) >= 90
    return found


def answer(*words: str) -> str:
    """What `clipscale train WORDS` is answered; empty: it is not refused before the data are looked at."""
    try:
        compose_settings("train", overrides_of("train", parse_flags("train", words).words)[1])
    except UserError as error:
        return str(error)
    return ""


def test_every_flag_of_open_clip_is_answered_by_a_setting_or_by_why_there_is_none(flags: list[str]) -> None:
    """It is typed as a flag and as a key."""
    wrong = []
    for flag in flags:
        key = flag.removeprefix("--").replace("-", "_")
        typed = answer(flag, "1e-3")
        meant = re.search(r"(?:write|did you mean) '?([\w.]+)", typed)
        absent = ABSENT["open_clip"].get(key, "\0")
        if not (absent in typed or (meant and meant[1] in KNOWN and (key in KNOWN or key in ALIASES))):
            wrong.append(f"{flag}: {typed}")
        if key not in KNOWN and answer(f"{key}=1e-3") not in typed:
            wrong.append(f"{key}: {answer(f'{key}=1e-3')} and {typed}")
    assert not wrong, "\n".join(wrong)


def test_words_of_open_clip_are_flags_that_it_has_and_settings_that_there_are(flags: list[str]) -> None:
    assert not {f"--{word.replace('_', '-')}" for word in ABSENT["open_clip"]} - {*flags}
    assert {value.partition("=")[0] for key, value in ALIASES.items() if "=" not in key} <= KNOWN
    assert not ALIASES.keys() & ABSENT["open_clip"].keys()


def test_the_page_names_every_flag_with_its_setting_or_in_the_list_of_what_is_not_here(flags: list[str]) -> None:
    table = dict(re.findall(r"^\| (`--.*?) \| (.*?) \|", PAGE, re.M))
    here = {flag: ours for cell, ours in table.items() for flag in re.findall(r"--[\w-]+", cell)}
    _, _, section = PAGE.partition("\n## What is not here\n")
    missing = {flag for cell in re.findall(r"^- (`--.*?):", section, re.M) for flag in re.findall(r"--[\w-]+", cell)}
    assert here.keys() | missing == {*flags} and not here.keys() & missing
    assert missing == {f"--{word.replace('_', '-')}" for word in ABSENT["open_clip"]}
    assert {name for ours in here.values() for name in re.findall(r"`'?([\w.]+)(?:=[^`]*)?`", ours)} <= KNOWN


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr 1e-3", "--lr: unknown key 'lr'; did you mean 'optim.lr'?; settings are KEY=VALUE"),
        ("--batch-size=256 --wd 0.1", "--batch-size=256 --wd: unknown key 'batch_size'; did you mean 'batch'?;"),
        ("--val-num-samples 5", "--val-num-samples: unknown key 'val_num_samples': held-out pairs are counted"),
        ("--precision amp", "--precision: write precision=...; "),
        ("--cfgg job", "--cfgg: unknown flag; did you mean '--cfg'?"),
        ("val_num_samples=3", "unknown key 'val_num_samples': held-out pairs are counted"),
        ("dist_backend=nccl", "unknown key 'dist_backend': it is NCCL on GPUs"),
        ("image_resize_mode=squash", "unknown key 'image_resize_mode'; did you mean 'model.preprocess={resize_mode"),
    ],
)  # fmt: skip
def test_words_of_open_clip_are_answered(words: str, expected: str) -> None:
    assert answer(*words.split()).startswith(expected)


# ---- what earlier versions had ----

REMOVED = {name: version for version, names in ABSENT["removed"].items() for name in names}


def test_nothing_that_is_there_is_called_removed() -> None:
    for name in REMOVED:
        verb = next((verb for verb in VERBS if name.startswith(f"{verb} ")), "train")
        key, _, value = name.removeprefix(f"{verb} ").partition("=")
        settings = settings_of(VERBS[verb].settings)
        if name.startswith("verb "):
            assert name.removeprefix("verb ") not in VERBS
        elif value:
            assert value not in group_options().get(key, ()) and value not in (
                settings[key].choices if key in settings else ()
            )
        else:
            assert not any(
                f"{known}.".startswith(f"{key}.") for known in (*settings, *default_choices(VERBS[verb].conf))
            )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train loss.shared=positive", "loss.shared was removed in 0.2.0: pairs of equal keys are left out"),
        ("train ramp.start=1k", "ramp.start was removed in 0.2.0: a growing batch is a run in stages"),
        ("train --ramp.start 1k", "--ramp.start: ramp.start was removed in 0.2.0: a growing batch"),
        ("train offload=encoded", "offload=encoded was removed in 0.2.0: take offload=host"),
        ("train -m offload=host,encoded", "offload=encoded was removed in 0.2.0"),
        ("train experiment=clipa-l16", "experiment=clipa-l16 was removed in 0.2.0: experiment=clipa-b16"),
        ("train launch=slurm", "launch=slurm was removed in 0.1.0: the Slurm script"),
        ("train eval.workers=3", "eval.workers was removed in 0.2.0: it is a constant"),
        ("embed run=a format=npy", "format was removed in 0.2.0: the features are"),
        ("report a live=true", "live was removed in 0.2.0: wandb and TensorBoard"),
        ("eval run=a checkpoint=all", "checkpoint=all was removed in 0.2.0: give one step"),
        ("plan model.lean=false", "model.lean was removed in 0.2.0: towers compute"),
        ("bench loss", "verb bench was removed in 0.1.0: benchmarks are scripts"),
        ("data stats a.tar", "verb data stats was removed in 0.1.0: clipscale data check"),
    ],
)  # fmt: skip
def test_a_removed_name_is_answered_by_what_happened(command: str, expected: str) -> None:
    with refused(f"^{re.escape(expected)}"):
        verb, words = split_verb(command.split())
        line = parse_flags(verb, words)
        if line.multirun:
            jobs.compose_runs(line.words, None, None)
        else:
            compose_settings(verb, overrides_of(verb, line.words)[1])


def test_a_setting_of_one_verb_is_removed_of_that_alone() -> None:
    assert "removed" not in unknown_key("format", SETTINGS, "train")


def test_a_removed_choice_in_a_file_is_answered_alike() -> None:
    with refused("^launch.parallel=zero1 was removed in 0.2.0: take launch.parallel=zero2"):
        accepted_value(SETTINGS["launch.parallel"], "zero1")
