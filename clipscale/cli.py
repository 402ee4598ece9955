"""The command line: takes the verb off, composes the configuration, starts the work, and turns every mistake into one line."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from clipscale import __version__, usage
from clipscale.errors import StoppedError, UserError
from clipscale.keys import keys
from clipscale.spelling import nearest, run_folder, split
from clipscale.usage import EVAL, FEATURES, PLAN, TRAIN

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
        return 128 + signal.SIGTERM if isinstance(error, StoppedError) else 2
    except KeyboardInterrupt as error:
        number = getattr(error, "signum", signal.SIGINT)
        print(str(error) or "stopped by SIGINT", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        usage.show_overview({name: verb.summary for name, verb in VERBS.items()})
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"clipscale {__version__}")
        return 0
    name, *rest = argv
    if name not in VERBS:
        listed = ", ".join(VERBS)
        raise UserError(f"unknown verb '{name}'{nearest(name, VERBS)}; there are {listed}")
    if any(word in ("-h", "--help") for word in rest):
        VERBS[name].show_help([word for word in rest if word not in ("-h", "--help")])
        return 0
    return VERBS[name].run(rest)


# ---- train ----


def train(argv: list[str]) -> int:
    """One run: composed once, here, and carried to the workers as it is; or, under torchrun, this process's part of it."""
    from clipscale import compose

    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if any(word in MULTIRUN for word in argv):
        if under_torchrun:
            raise UserError(
                "-m under torchrun would start the whole sweep in every rank; leave torchrun out, "
                "clipscale starts the workers of each job itself"
            )
        from clipscale import sweep

        return sweep.main(argv)
    values = compose.once("train", TRAIN, argv)
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


# ---- eval ----


def evaluate(argv: list[str]) -> int:
    """A run's checkpoint on evaluation sets; under torchrun, this process's share."""
    config = composed("eval", EVAL, argv)
    if config is not None:
        from clipscale.eval.verb import main

        main(config)
    return 0


# ---- plan ----


def plan(argv: list[str]) -> int:
    """Status 1 where the run does not fit."""
    if "RANK" in os.environ:
        raise UserError(
            "plan under torchrun would be made in every rank; leave torchrun out, and give gpus= and nodes="
        )
    config = composed("plan", PLAN, argv)
    if config is None:
        return 0
    of_train = {key.name.partition(".")[0] for key in keys(*TRAIN)} - {"run"}
    given = [word for word in argv if word.partition("=")[0].partition(".")[0].lstrip("+~") in of_train]
    if config.run and given:
        raise UserError(f"run={config.run}: the settings are that run's own; leave out {given[0]}")
    from clipscale.plan.verb import main

    return main(config)


# ---- the small verbs ----


@dataclass
class DemoSettings:
    """`clipscale data demo`: render the demo set."""

    root: str | None = None
    """Folder to write; the user's cache folder if not given."""
    samples: int = 20_000
    """Training pairs."""
    seed: int = 0
    """The same seed renders the same bytes."""
    force: bool = False
    """Render anew even if the same set is already there."""


def data(argv: list[str]) -> int:
    tools = {"demo": demo, "index": data_index, "check": data_check, "stats": data_stats, "features": data_features}
    if not argv or argv[0] not in tools:
        word = argv[0] if argv else ""
        raise UserError(f"data {word}: unknown; there is {', '.join(tools)}, as in: clipscale data demo")
    return tools[argv[0]](argv[1:])


def data_index(argv: list[str]) -> int:
    from clipscale.data.tools import IndexSettings, make_index

    words, given = apart(IndexSettings, argv)
    return make_index(words, simple(IndexSettings, "data index", given))


def data_check(argv: list[str]) -> int:
    from clipscale.data.tools import CheckSettings, check_shards

    words, given = apart(CheckSettings, argv)
    return check_shards(words, simple(CheckSettings, "data check", given))


def data_features(argv: list[str]) -> int:
    """Under torchrun, this process's share."""
    config = composed("data features", FEATURES, argv)
    if config is not None:
        from clipscale.features import main

        main(config)
    return 0


def data_stats(argv: list[str]) -> int:
    from clipscale.data.tools import StatsSettings, show_stats

    words, given = apart(StatsSettings, argv)
    return show_stats(words, simple(StatsSettings, "data stats", given))


def apart(settings: type[Any], argv: list[str]) -> tuple[list[str], list[str]]:
    """Plain words, such as shards, and KEY=VALUE settings. What looks like a key but is none is left to `simple` to refuse."""
    declared = {key.name.partition(".")[0] for key in keys(settings.__module__, settings.__name__)}
    given = [
        word
        for word in argv
        if (key := word.partition("=")[0]) != word
        and (key.partition(".")[0] in declared or (key.isidentifier() and not os.path.exists(word)))  # noqa: PTH110
    ]
    return [word for word in argv if word not in given], given


def demo(argv: list[str]) -> int:
    settings = simple(DemoSettings, "data demo", argv)
    from clipscale.data.demo import main as render

    render(settings.root, seed=settings.seed, samples=settings.samples, force=settings.force)
    return 0


@dataclass
class ReportSettings:
    """`clipscale report`: a page and a picture of a run, made from its folder."""

    run: str = ""
    """NAME of the run's folder under runs/, or its path."""


def report(argv: list[str]) -> int:
    settings = simple(ReportSettings, "report", argv)
    if not settings.run:
        raise UserError("report needs run=NAME or run=PATH")
    from clipscale.report.plots import write_report

    page = write_report(run_folder(settings.run))
    print(f"{page}\n{page.with_suffix('.png')}")
    return 0


def export(argv: list[str]) -> int:
    from clipscale.export import ExportSettings, main

    main(simple(ExportSettings, "export", argv))
    return 0


def doctor(argv: list[str]) -> int:
    from clipscale.doctor import DoctorSettings, main

    return main(simple(DoctorSettings, "doctor", argv))


def bench(argv: list[str]) -> int:
    tools = {"loss": bench_loss, "step": bench_step, "data": bench_data}
    if not argv or argv[0] not in tools:
        word = argv[0] if argv else ""
        raise UserError(f"bench {word}: unknown; there is {', '.join(tools)}, as in: clipscale bench loss n=4k")
    return tools[argv[0]](argv[1:])


def bench_loss(argv: list[str]) -> int:
    """Status 1 where a method failed for a reason other than memory or a known limit."""
    from clipscale.bench.loss import LossBenchSettings, main

    rows = main(simple(LossBenchSettings, "bench loss", argv))
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def bench_step(argv: list[str]) -> int:
    """Status 1 where a method failed for a reason other than memory."""
    from clipscale.bench.step import StepBenchSettings, main

    rows = main(simple(StepBenchSettings, "bench step", argv))
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def bench_data(argv: list[str]) -> int:
    from clipscale.bench.data import DataBenchSettings, main

    main(simple(DataBenchSettings, "bench data", argv))
    return 0


def composed(verb: str, settings: tuple[str, str], argv: list[str]) -> Any | None:
    """The settings of a verb that has a file of its name in conf/, composed and checked; None where Hydra only printed something."""
    if any(word in MULTIRUN for word in argv):
        raise UserError(f"{verb} takes no -m; give one value for each setting")
    from clipscale import compose

    values = compose.once(verb.rpartition(" ")[2], settings, argv)
    if values is None:
        return None
    from clipscale.config import check_values
    from clipscale.settings import typed

    module, name = settings
    config = typed(getattr(import_module(module), name), values)
    check_values(config)
    return config


def simple(settings: type[Any], verb: str, argv: list[str]) -> Any:
    """KEY=VALUE arguments as the dataclass `settings`, for verbs too small to need groups and files."""
    from clipscale.settings import typed

    values: dict[str, Any] = {}
    declared = keys(settings.__module__, settings.__name__)
    kinds = {key.name: key.type for key in declared}
    for word in argv:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(
                f"{verb} {word}: give settings as KEY=VALUE; the keys are {', '.join(k.name for k in declared)}"
            )
        value: Any = text
        if kinds.get(name, "").startswith("list") and text.startswith("[") and text.endswith("]"):
            value = split(text[1:-1])
        elif text == "null" and kinds.get(name, "").endswith("None"):
            value = None
        *path, leaf = name.split(".")
        node = values
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return typed(settings, values)


def completion(argv: list[str]) -> int:
    """`completion bash` prints what a shell needs; the shell then asks with `completion query LINE`."""
    match argv:
        case ["bash"]:
            print(usage.BASH)
        case ["query", line]:
            print("\n".join(usage.complete(line, list(VERBS))))
        case _:
            raise UserError('completion: only bash is known; put  eval "$(clipscale completion bash)"  into ~/.bashrc')
    return 0


@dataclass(frozen=True)
class Verb:
    summary: str
    run: Callable[[list[str]], int]
    show_help: Callable[[list[str]], None]


VERBS = {
    "train": Verb("train a model, or go on with a run", train, usage.show_train),
    "eval": Verb("zero-shot classification and retrieval with a run's checkpoint", evaluate, usage.show_eval),
    "plan": Verb("whether a run fits, and its time, before it is started: no GPU needed", plan, usage.show_plan),
    "data": Verb(
        "`data demo`: a small set to try things on; `data index`, `check`, `stats`: look after shards; `data features`: a frozen tower's",
        data,
        usage.show_data,
    ),
    "report": Verb("draw a run: curves, results and retrieved images, on one page", report, usage.show_report),
    "export": Verb("a run's weights as a folder that open_clip loads", export, usage.show_export),
    "bench": Verb("`bench loss`, `step`, `data`: time and memory, beside other people's", bench, usage.show_bench),
    "doctor": Verb("whether this machine is ready to train, found out by trying", doctor, usage.show_doctor),
    "completion": Verb("Tab completion for the shell", completion, usage.show_completion),
}
