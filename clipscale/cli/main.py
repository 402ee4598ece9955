"""The command line: finds the verb, makes its settings, starts its work, and prints every mistake in one line."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import cast

from clipscale import __version__
from clipscale.cli import completion, help
from clipscale.cli.report_failure import report_failure
from clipscale.cli.train_checks import check_weights
from clipscale.cli.verbs import VERBS, split_verb
from clipscale.common.output import ignore_output_errors, prepare_output
from clipscale.common.terminal import announce_task, clear, print_line, show_task
from clipscale.config.config_file import to_yaml
from clipscale.run.stopping import exit_on_signal


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (a failure), 2 (a mistake the user can fix) or 128 + signal."""
    prepare_output()
    prepare_torch()
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except BaseException as error:
        return report_failure(error)
    finally:
        clear()


def run(argv: list[str]) -> int:
    """Find the verb, make its settings and call its `main`, or show help."""
    if argv in (["-V"], ["--version"], ["version"]):
        print_line(f"clipscale {__version__}")
        return 0
    asked = argv[1:] if argv[:1] == ["help"] else argv
    words = [word for word in asked if word not in ("-h", "--help")]
    if "help" in words[1:3]:
        words.remove("help")
    asks_for_help = words != argv  # a word that asks for help was removed
    if asks_for_help or not words or help.begins_several(words):
        help.show_help([word for word in words if not word.startswith("-") and "=" not in word])
        return 0
    name, words = split_verb(words)
    if name == "completion":
        return completion.main(words)
    show_task("reading the settings")
    from clipscale.cli.compose import compose_settings  # imports Hydra
    from clipscale.cli.words import overrides_of, parse_flags

    verb = VERBS[name]
    line = parse_flags(name, words)
    if not (line.cfg or line.check or verb.only_prints):
        ignore_output_errors()
    if line.multirun:
        from clipscale.cli.sweep import run_sweep

        return run_sweep.main(name, line)
    plain_words, overrides = overrides_of(name, line.words)
    settings = compose_settings(name, overrides, line.config_dir)
    if line.cfg:
        clear()
        if verb.conf == "train":
            print("# @package _global_")  # so that the output can be saved as an experiment for --config-dir
        print(to_yaml(settings), end="", flush=True)
    arguments = (plain_words, settings) if verb.plain_words else (settings,)
    verb.check(*arguments)
    if hasattr(settings, "model"):
        check_weights(settings, checks_connection=verb.fetches_weights and not line.cfg)
    if line.check and verb.check_work:
        with exit_on_signal():
            announce_task("loading torch", error=True)
            resolve_name(verb.check_work)(settings)
    if line.cfg or line.check:
        return 0
    with nullcontext() if verb.handles_signals else exit_on_signal():
        status = load_main(name)(*arguments)
    return status if isinstance(status, int) else 0


def load_main(name: str) -> Callable[..., object]:
    """The function of a verb. A signal during its imports is answered with a line, as during its work."""
    with exit_on_signal():
        if VERBS[name].imports_torch:
            announce_task("loading torch", error=True)
        else:
            show_task(f"loading clipscale {name}")
        return cast(Callable[..., object], resolve_name(VERBS[name].main))


def prepare_torch() -> None:
    """Set variables that torch reads when it is loaded, unless they are set. All processes of a run inherit them.

    OpenMP's idle threads sleep: threads that spin keep the cores that data workers and other ranks need. The segments
    of a GPU's allocator grow: chunks of many widths leave gaps in segments of fixed sizes.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if not any(name.startswith(("OMP_", "GOMP_", "KMP_")) for name in os.environ):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = "0"
