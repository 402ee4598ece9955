"""Processes of the tests start as forks of one server, which has imported the slow modules. An interpreter of its own takes seconds."""

import multiprocessing
import os
from multiprocessing import util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOAD = [
    "pytest",
    "hypothesis",
    "clipscale.train",
    "clipscale.data.loader.workers",
    "tests.loss.workers",
    "tests.data.streams",
    "tests.test_precision",
]


class Fork(ForkServerProcess):
    """A fork of the server, with the environment of the process that starts it, as a spawned one would have."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class Forks(ForkServerContext):
    Process = Fork  # type: ignore[assignment]


def forks() -> Forks:
    return Forks()


def share_one_server() -> None:
    """From now on, processes that the package spawns are forks too, and its loaders do not choose what the server imports."""
    util.get_temp_dir()  # where the server listens; a run that starts it first would delete its own
    multiprocessing.set_forkserver_preload(PRELOAD)
    vars(multiprocessing)["set_forkserver_preload"] = lambda names: None
    get_context = multiprocessing.get_context

    def context(method: str | None = None) -> Any:
        return forks() if method == "spawn" else get_context(method)

    vars(multiprocessing)["get_context"] = context
