"""The command line: finds the verb, makes its settings, starts its work, and prints every mistake in one line."""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from clipscale import __version__
from clipscale.cli import help
from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.terminal import prepare, report, say
from clipscale.common.units import nearest
from clipscale.launch import local

if TYPE_CHECKING:
    from clipscale.cli.compose import Words


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (a failure), 2 (a mistake the user can fix) or 128 + signal."""
    prepare()
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except local.WorkerError as error:
        report(error, error.details)
        return 1
    except KeyboardInterrupt:
        say("stopped by SIGINT", error=True)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError) as error:  # OSError: a folder without permission, a full disk
        if os.environ.get("CLIPSCALE_DEBUG") == "1":
            traceback.print_exc()
        if local.main_rank():  # all ranks compose, and make the same mistakes
            report(error)
        if isinstance(error, StoppedError):
            return 128 + error.number
        return 2 if isinstance(error, UserError) else 1


def run(argv: list[str]) -> int:
    """Find the verb, make its settings and call its `main`, or show help."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        help.show_overview()
        return 0
    if argv[0] in ("-V", "--version", "version"):
        say(f"clipscale {__version__}")
        return 0
    topics = [word for word in argv[1:] if word not in ("-h", "--help")]
    if argv[0] in VERBS and topics != argv[1:]:
        help.show_help(argv[0], topics)
        return 0
    name, words = tool_named(argv)
    from clipscale.cli import compose  # imports Hydra

    tool, line = TOOLS[name], compose.parse(words)
    if line.multirun:
        return sweep(name, line)
    plain, overrides = compose.overrides(name, line.words)
    config = compose.values(name, overrides, line.config_dir)
    settings = compose.resolved(name, config)
    if line.cfg:
        print(compose.as_yaml(config), end="")
        return 0
    tool.check(settings)
    function = resolve_name(tool.main)
    result = function(plain, settings) if tool.words else function(settings)
    if name == "train" and local.main_rank():
        say(f"done: {result['run']} (step {result['step']}, loss {result['loss']:.4f})")
    return result if isinstance(result, int) else 0


def tool_named(argv: list[str]) -> tuple[str, list[str]]:
    """The name in TOOLS that the first words say, and the other words. Raises UserError."""
    verb, *rest = argv
    if verb not in VERBS:
        raise UserError(f"unknown verb '{verb}'{nearest(verb, VERBS)}; there are {', '.join(VERBS)}")
    tools = tools_of(verb)
    if not tools:
        return verb, rest
    tool, *rest = rest or [""]
    if tool not in tools:
        example = TOOLS[f"{verb} {tools[0]}"].examples.partition("\n")[0]
        wrong = f"{verb} {tool}: unknown{nearest(tool, tools)}" if tool else f"{verb}: of what"
        raise UserError(f"{wrong}; there is {', '.join(tools)}, as in: {example}")
    return f"{verb} {tool}", rest


def sweep(name: str, line: "Words") -> int:
    """`train -m`. Raises UserError for other verbs, and under torchrun."""
    if name != "train":
        raise UserError(f"{name} takes no -m; give one value for each setting")
    if local.under_torchrun():
        raise UserError("-m under torchrun would start the whole sweep in every rank; leave torchrun out")
    from clipscale.cli.sweep import main as run_all

    return run_all(line)
