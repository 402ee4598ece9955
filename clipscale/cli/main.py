"""The command line: finds the verb, makes its settings, starts its work, and prints every mistake in one line."""

import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import reduce
from pkgutil import resolve_name
from typing import Any

from clipscale import __version__
from clipscale.cli import help, overrides
from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.common.errors import UserError
from clipscale.common.terminal import prepare, report, say
from clipscale.common.units import nearest, split
from clipscale.config.checks import check_values
from clipscale.config.parse import misnamed, typed
from clipscale.config.redact import redacted_output
from clipscale.config.renamed import current
from clipscale.config.setting import settings_of
from clipscale.config.train import TrainConfig, check
from clipscale.launch import local, submit
from clipscale.launch.agent import speaks, status
from clipscale.launch.processes import end_with_launcher
from clipscale.safe_path import protect


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (a failure), 2 (a mistake the user can fix) or 128 + signal."""
    if argv is None:  # a program of its own; a caller keeps its module path
        argv = sys.argv[1:]
        protect()
        end_with_launcher()
    prepare()
    with redacted_output():
        try:
            return dispatch(list(argv))
        except local.WorkerError as error:
            report(error, error.details)
            return 1
        except KeyboardInterrupt as error:
            say(str(error) or "stopped by SIGINT", error=True)
            return 128 + getattr(error, "signum", signal.SIGINT)
        except BrokenPipeError:  # the reader of our output has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (UserError, OSError) as error:
            if os.environ.get("CLIPSCALE_DEBUG") == "1":
                traceback.print_exc()
            if not isinstance(error, UserError) or speaks(error):
                report(error)
            # others: a name that no file can have, a folder without permission, a full disk
            return status(error) if isinstance(error, UserError) else 1


def dispatch(argv: list[str]) -> int:
    """Find the verb and its tool, and run it or show its help."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        help.show_overview()
        return 0
    if argv[0] in ("-V", "--version", "version"):
        say(f"clipscale {__version__}")
        return 0
    name, *rest = argv
    if name not in VERBS:
        raise UserError(f"unknown verb '{name}'{nearest(name, VERBS)}; there are {', '.join(VERBS)}")
    topics = [word for word in rest if word not in ("-h", "--help")]
    if topics != rest:
        help.show_help(name, topics)
        return 0
    if tools := tools_of(name):
        tool, *rest = rest or [""]
        if tool not in tools:
            example = TOOLS[f"{name} {tools[0]}"].examples.partition("\n")[0]
            wrong = f"{name} {tool}: unknown{nearest(tool, tools)}" if tool else f"{name}: of what"
            raise UserError(f"{wrong}; there is {', '.join(tools)}, as in: {example}")
        name = f"{name} {tool}"
    own = {"train": train, "launch": launch, "plan": plan, "completion": completion}
    return own[name](rest) if name in own else work(name, rest)


def train(argv: list[str]) -> int:
    """One run, whose settings this process composes for all workers; under torchrun, this process's part of it; or a sweep."""
    if any(word in overrides.MULTIRUN for word in argv):
        if local.under_torchrun():
            raise UserError(
                "-m under torchrun would start the whole sweep in every rank; leave torchrun out, "
                "clipscale starts the workers of each job itself"
            )
        overrides.prepare(TOOLS["train"], argv)  # finds mistakes before Hydra is imported
        from clipscale.cli import sweep as sweeps

        return sweeps.main(argv)
    config: TrainConfig | None = composed("train", argv)
    if config is None:
        return 0
    named = bool(config.run)
    check(config)
    if config.job.scheduler != "local" and not local.under_torchrun():
        return submit.launch(config, argv, named=named)
    local.make_ready(config, named=named)
    result = local.join(config) if local.under_torchrun() else local.run(config)
    if os.environ.get("RANK", "0") == "0":
        say(f"done: {result['run']} (step {result['step']}, loss {result['loss']:.4f})")
    return 0


def launch(argv: list[str]) -> int:
    """Start a run with the scheduler that `launch=` names; with --dry-run print what would be started."""
    words = [word for word in argv if word != "--dry-run"]
    config: TrainConfig | None = composed("launch", words)
    if config is None:
        return 0
    named = bool(config.run)
    return submit.launch(check(config), words, named=named, dry_run=words != argv)


def plan(argv: list[str]) -> int:
    """Refuse torchrun, and settings beside `run=`, before anything is composed."""
    if "RANK" in os.environ:
        raise UserError(
            "plan under torchrun would be made in every rank; leave torchrun out, and give gpus= and nodes="
        )
    run = next((word for word in argv if word.startswith("run=") and word != "run="), None)
    of_train = {one.name.partition(".")[0] for one in settings_of(TrainConfig)} - {"run"}
    given = [word for word in argv if word.partition("=")[0].partition(".")[0].lstrip("+~") in of_train]
    if run and given:
        raise UserError(f"{run}: the settings are that run's own; leave out {given[0]}")
    return work("plan", argv)


def completion(argv: list[str]) -> int:
    """`completion SHELL` prints a script for the shell, which then asks with `completion query LINE`."""
    from clipscale.cli.completion import SCRIPTS, SETUP, complete

    match argv:
        case [shell] if shell in SCRIPTS:
            print(SCRIPTS[shell])
        case ["query", line]:
            print("\n".join(complete(line)))
        case _:
            raise UserError(f"completion: choose {', '.join(SCRIPTS)}; for bash, put  {SETUP['bash']}")
    return 0


def work(name: str, argv: list[str]) -> int:
    """Make the settings of a tool from `argv`, check them, and call its `main`. Under torchrun, this process's share."""
    tool = TOOLS[name]
    words, settings = ([], composed(name, argv)) if tool.file else simple(name, argv)
    if settings is None:
        return 0
    tool.check(settings)
    main = resolve_name(tool.main)
    result = main(words, settings) if tool.words else main(settings)
    if isinstance(result, list):  # a benchmark's rows: out of memory and known limits are no failures
        return int(any(row.get("status") == "failed" for row in result))
    return result if isinstance(result, int) else 0


def composed(name: str, argv: list[str]) -> Any | None:
    """The settings of a tool with a file in conf/; None if Hydra only printed something. Raises UserError."""
    if any(word in overrides.MULTIRUN for word in argv):
        raise UserError(f"{name} takes no -m; give one value for each setting")
    overrides.prepare(TOOLS[name], argv)  # finds mistakes before Hydra is imported
    from clipscale.cli import compose

    values = compose.once(name, argv)
    if values is None:
        return None
    settings = typed(TOOLS[name].settings, values)
    check_values(settings)
    return settings


def simple(name: str, argv: list[str]) -> tuple[list[str], Any]:
    """The plain words, such as shards, of a tool that takes any, and its settings from KEY=VALUE, without groups and files.

    A word that looks like KEY=VALUE and is no file is a setting. Raises UserError for a word that is neither.
    """
    tool = TOOLS[name]
    settings = {one.name: one for one in settings_of(tool.settings)}
    sections = {key.partition(".")[0] for key in settings}
    words: list[str] = []
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        key = current(key, settings)
        like_a_key = re.fullmatch(r"[A-Za-z_][\w.]*", key) is not None
        known = key.partition(".")[0] in sections or (like_a_key and not os.path.exists(word))  # noqa: PTH110 (False for a word that no file can be named)
        if tool.words and not (equals and known):
            words.append(word)
            continue
        if not equals:
            raise UserError(f"{name} {word}: give settings as KEY=VALUE; the keys are {', '.join(settings)}")
        if key not in settings:
            raise UserError(misnamed(key, settings))
        value: Any = text
        if settings[key].kind is list and text.startswith("[") and text.endswith("]"):
            value = split(text[1:-1])
        elif text == "null" and settings[key].optional:
            value = None
        *path, leaf = key.split(".")
        reduce(lambda tree, part: tree.setdefault(part, {}), path, values)[leaf] = value
    made = typed(tool.settings, values)
    check_values(made)
    return words, made
