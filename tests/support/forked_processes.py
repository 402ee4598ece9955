"""Processes of the tests start as forks of one server, itself a fork of pytest when it has loaded all tests.

An interpreter of its own takes seconds.
"""

import faulthandler
import multiprocessing
import os
import socket
import warnings
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any


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
    Process = Fork


def forks() -> Forks:
    return Forks()


def share_one_server() -> None:
    """From now on, processes that the package spawns are forks of this server too.

    An interpreter of its own has processes as users do (`interpreter.py`): tests/data/loader/test_fork_server.py.
    """
    util.get_temp_dir()  # where the server listens; a run that starts it first would delete its own
    get_context = multiprocessing.get_context

    def context(method: str | None = None) -> Any:
        return forks() if method in ("spawn", "forkserver") else get_context(method)

    vars(multiprocessing)["get_context"] = context


def warm_up() -> None:
    """Do once what each run does at its start, so that forks begin with it: FLOPs, torch's tensors without values, and
    a step. It starts no thread."""
    import torch

    from clipscale.config.model import ModelConfig
    from clipscale.config.sections import OptimConfig
    from clipscale.models.flops import Flops
    from clipscale.models.towers import build_model
    from clipscale.step.optim import build_optimizer
    from tests.support.runs import ARCHITECTURE

    config = ModelConfig(name="test", architecture=ARCHITECTURE)
    with torch.random.fork_rng():
        model = build_model(config)
    Flops.of_model(config, model, torch.device("cpu")).per_sample({8: 1, 16: 1, 24: 1})
    features = model.image(torch.zeros(2, 3, 30, 30)), model.text(torch.ones(2, 24, dtype=torch.long))
    (features[0] @ features[1].T * model.logit_scale.exp()).sum().backward()
    build_optimizer(model, OptimConfig()).step()


def start_a_server() -> None:
    """Start multiprocessing's own server, where no fork of this process can be one. It imports the package for all."""
    multiprocessing.set_forkserver_preload(["clipscale.train", "tests.loss.workers"])
    forkserver.ensure_running()


def fork_a_server() -> None:
    """Do what `forkserver.ensure_running` does, by a fork of this process. Its forks start theirs with it, too."""
    server: Any = forkserver._forkserver  # its type has no private parts
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        address = arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        until_all_end, alive = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: pytest's workers have a thread
            child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(alive)
                faulthandler.disable()  # a fork that is to end by a signal prints no stack
                vars(forkserver)["ensure_running"] = server.ensure_running = lambda: None
                forkserver.main(listener.detach(), until_all_end, [])
            except SystemExit:
                status = 0
            finally:
                os._exit(status)
        os.close(until_all_end)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, child
