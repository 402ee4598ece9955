"""The command line: takes the verb off, composes the configuration, starts the work, and turns every mistake into one line."""

import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from clipscale import __version__
from clipscale.cli import help as usage
from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.config.keys import keys
from clipscale.errors import StoppedError, UserError
from clipscale.units import nearest, split

MULTIRUN = ("-m", "--multirun")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (a failure), 2 (a mistake the user can mend) or 128 + signal."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return dispatch(argv)
    except UserError as error:
        if os.environ.get("CLIPSCALE_DEBUG") == "1":
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":  # the others' errors are in torchrun's report
            print(f"error: {error}", file=sys.stderr)
        return 128 + error.number if isinstance(error, StoppedError) else 2
    except KeyboardInterrupt as error:
        number = getattr(error, "signum", signal.SIGINT)
        print(str(error) or "stopped by SIGINT", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        usage.show_overview()
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"clipscale {__version__}")
        return 0
    name, *rest = argv
    if name not in VERBS:
        raise UserError(f"unknown verb '{name}'{nearest(name, VERBS)}; there are {', '.join(VERBS)}")
    if any(word in ("-h", "--help") for word in rest):
        usage.show_help(name, [word for word in rest if word not in ("-h", "--help")])
        return 0
    if tools := tools_of(name):
        tool, *rest = rest or [""]
        if tool not in tools:
            example = TOOLS[f"{name} {tools[0]}"].examples.partition("\n")[0]
            wrong = f"{name} {tool}: unknown{nearest(tool, tools)}" if tool else f"{name}: of what"
            raise UserError(f"{wrong}; there is {', '.join(tools)}, as in: {example}")
        name = f"{name} {tool}"
    match name:
        case "train":
            return train(rest)
        case "plan":
            return plan(rest)
        case "completion":
            return completion(rest)
        case _:
            return work(name, rest)


# ---- verbs with ways of their own ----


def train(argv: list[str]) -> int:
    """One run: composed once, here, and carried to the workers as it is; or, under torchrun, this process's part of it."""
    from clipscale.cli import compose

    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if any(word in MULTIRUN for word in argv):
        if under_torchrun:
            raise UserError(
                "-m under torchrun would start the whole sweep in every rank; leave torchrun out, "
                "clipscale starts the workers of each job itself"
            )
        from clipscale.cli import sweep

        return sweep.main(argv)
    values = compose.once("train", argv)
    if values is None:
        return 0
    from clipscale import launch

    config = launch.checked(values)
    try:
        result = launch.join(config) if under_torchrun else launch.run(config)
    except launch.WorkerError as error:
        print(f"{error.details}error: {error}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(f"done: {result['run']} (step {result['step']}, loss {result['loss']:.4f})")
    return 0


def plan(argv: list[str]) -> int:
    """What makes no sense is refused before anything is composed."""
    if "RANK" in os.environ:
        raise UserError(
            "plan under torchrun would be made in every rank; leave torchrun out, and give gpus= and nodes="
        )
    run = next((word for word in argv if word.startswith("run=") and word != "run="), None)
    of_train = {key.name.partition(".")[0] for key in keys(*TOOLS["train"].settings)} - {"run"}
    given = [word for word in argv if word.partition("=")[0].partition(".")[0].lstrip("+~") in of_train]
    if run and given:
        raise UserError(f"{run}: the settings are that run's own; leave out {given[0]}")
    return work("plan", argv)


def completion(argv: list[str]) -> int:
    """`completion bash` prints what a shell needs; the shell then asks with `completion query LINE`."""
    from clipscale.cli.completion import BASH, complete

    match argv:
        case ["bash"]:
            print(BASH)
        case ["query", line]:
            print("\n".join(complete(line)))
        case _:
            raise UserError('completion: only bash is known; put  eval "$(clipscale completion bash)"  into ~/.bashrc')
    return 0


# ---- every other ----


def work(name: str, argv: list[str]) -> int:
    """A tool of the table: its settings made from `argv`, and its `main` called with them. Under torchrun, this process's share."""
    tool = TOOLS[name]
    words, settings = ([], composed(name, argv)) if tool.file else simple(name, argv)
    if settings is None:
        return 0
    module, function = tool.function
    main = getattr(import_module(module), function)
    result = main(words, settings) if tool.words else main(settings)
    if isinstance(
        result, list
    ):  # a benchmark's rows: a method may fail for want of memory or by a known limit, but not otherwise
        return int(any(row.get("status") == "failed" for row in result))
    return result if isinstance(result, int) else 0


def composed(name: str, argv: list[str]) -> Any | None:
    """The settings of a tool that has a file in conf/, composed and checked; None where Hydra only printed something."""
    if any(word in MULTIRUN for word in argv):
        raise UserError(f"{name} takes no -m; give one value for each setting")
    from clipscale.cli import compose

    values = compose.once(name, argv)
    if values is None:
        return None
    from clipscale.config.parse import typed
    from clipscale.config.train import check_values

    config = typed(declared_class(name), values)
    check_values(config)
    return config


def simple(name: str, argv: list[str]) -> tuple[list[str], Any]:
    """The plain words, such as shards, where a tool takes any, and its settings from KEY=VALUE, without groups and files.

    Raises UserError for a word that is neither. What looks like a key and is no file is taken for a key.
    """
    from clipscale.config.parse import misnamed, typed
    from clipscale.config.renamed import current

    tool = TOOLS[name]
    kinds = {key.name: key.type for key in keys(*tool.settings)}
    sections = {key.partition(".")[0] for key in kinds}
    words: list[str] = []
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        key = current(key, kinds)
        like_a_key = re.fullmatch(r"[A-Za-z_][\w.]*", key) is not None
        known = key.partition(".")[0] in sections or (like_a_key and not Path(word).exists())
        if tool.words and not (equals and known):
            words.append(word)
            continue
        if not equals:
            raise UserError(f"{name} {word}: give settings as KEY=VALUE; the keys are {', '.join(kinds)}")
        if key not in kinds:
            raise UserError(misnamed(key, kinds))
        value: Any = text
        if kinds[key].startswith("list") and text.startswith("[") and text.endswith("]"):
            value = split(text[1:-1])
        elif text == "null" and kinds[key].endswith("None"):
            value = None
        *path, leaf = key.split(".")
        node = values
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return words, typed(declared_class(name), values)


def declared_class(name: str) -> type[Any]:
    """The dataclass of a tool's settings; importing it brings in its part."""
    module, settings = TOOLS[name].settings
    found: type[Any] = getattr(import_module(module), settings)
    return found
