"""The command line: finds the verb, makes its settings, starts its work, and prints every mistake in one line."""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pkgutil import resolve_name

from clipscale import __version__
from clipscale.cli import help
from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.terminal import prepare, report, say
from clipscale.common.units import nearest
from clipscale.config.train import TrainConfig, check, warnings
from clipscale.launch import local


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (a failure), 2 (a mistake the user can fix) or 128 + signal."""
    prepare()
    try:
        return dispatch(list(sys.argv[1:] if argv is None else argv))
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
        if os.environ.get("RANK", "0") == "0":  # all ranks compose, and make the same mistakes
            report(error)
        if isinstance(error, StoppedError):
            return 128 + error.number
        return 2 if isinstance(error, UserError) else 1


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
    return work(name, rest)


def work(name: str, argv: list[str]) -> int:
    """Make the settings of a tool from `argv` and call its `main`. Under torchrun, this process's share."""
    from clipscale.cli import compose  # imports Hydra

    tool, line = TOOLS[name], compose.parse(argv)
    if line.multirun:
        if name != "train":
            raise UserError(f"{name} takes no -m; give one value for each setting")
        if local.under_torchrun():
            raise UserError("-m under torchrun would start the whole sweep in every rank; leave torchrun out")
        from clipscale.cli import sweep

        return sweep.main(line)
    words, overrides = compose.overrides(name, line.words)
    config = compose.values(name, overrides, line.config_dir)
    settings = compose.resolved(name, config)
    if line.cfg:
        print(compose.as_yaml(config), end="")
        return 0
    if name == "train":
        return train(settings)
    tool.check(settings)
    run = resolve_name(tool.main)
    result = run(words, settings) if tool.words else run(settings)
    return result if isinstance(result, int) else 0


def train(config: TrainConfig) -> int:
    """One run, whose settings this process composes for all workers; under torchrun, this process's part of it."""
    if local.under_torchrun() and not config.run:
        raise UserError("run is not set; under torchrun all ranks need the same name, run=NAME")
    check(config)
    if not local.under_torchrun():  # there all ranks find it out together
        from clipscale.data.shards import listing

        listing.check_local(config.data)
    main_rank = os.environ.get("RANK", "0") == "0"
    if main_rank:
        for warning in warnings(config):
            say(f"warning: {warning}", error=True)
    result = local.run(config)
    if main_rank:
        say(f"done: {result['run']} (step {result['step']}, loss {result['loss']:.4f})")
    return 0
