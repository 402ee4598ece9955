"""TensorBoard and wandb, the sinks of a run's records. A sink that fails does not end the run."""

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from types import ModuleType

from clipscale.common.record import Results
from clipscale.common.remote import announced
from clipscale.common.terminal import log_line, log_warning

# Two functions: one writes the numbers of a step, one closes the sink.
Sink = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


class Sinks:
    """The sinks of a run. A sink that fails gives one warning and is closed. `open_sinks` opens them."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}

    def open(self, name: str, opened: Callable[[], Sink]) -> None:
        """Add the sink that the function opens."""

        def add() -> None:
            self._sinks[name] = opened()

        self._call(name, add)

    def write(self, step: int, record: Mapping[str, object]) -> None:
        """Give the numbers of a record to every sink, under their names."""
        values = {name: value for name, value in record.items() if isinstance(value, int | float)}
        for name, (write, _) in list(self._sinks.items()):
            self._call(name, partial(write, step, values))

    def write_evaluation(self, step: int, results: Results) -> None:
        """Give evaluation results to every sink, as `eval/SET/METRIC`."""
        self.write(
            step,
            {f"eval/{name}/{metric}": value for name, metrics in results.items() for metric, value in metrics.items()},
        )

    def close(self) -> None:
        """Close every sink. Safe to call twice."""
        while self._sinks:
            name, (_, close) = self._sinks.popitem()
            self._call(name, close)

    def _call(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._sinks.pop(name, None)
            log_warning(f"{name} failed and is off from here on ({type(error).__name__}: {error})")


def open_sinks(
    run_dir: Path, wandb_mode: str, uses_tensorboard: bool, settings: Mapping[str, object], resume_step: int = 0
) -> Sinks:
    """Open the sinks that the settings ask for.

    `wandb_mode`: online, offline or disabled. `settings`: the run's, for wandb.
    """
    sinks = Sinks()
    if uses_tensorboard:
        sinks.open("tensorboard", lambda: tensorboard(run_dir, resume_step))
    if wandb_mode != "disabled":
        sinks.open("wandb", lambda: wandb(run_dir, wandb_mode, settings))
    return sinks


def log_wandb_mode(setting: str, mode: str) -> None:
    """Log the mode of wandb if the environment has changed the setting."""
    if mode != setting:
        log_line(f"WANDB_MODE={os.environ['WANDB_MODE']} of the environment counts, not log.wandb={setting}")


def tensorboard(run_dir: Path, resume_step: int) -> Sink:
    """Event files in RUN/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what the interrupted run wrote after the resumed step.
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def wandb_module() -> ModuleType:
    """wandb, which `clipscale.__main__` hides from other libraries."""
    if sys.modules.get("wandb", sys) is None:
        del sys.modules["wandb"]
    return import_module("wandb")


def wandb(run_dir: Path, mode: str, settings: Mapping[str, object]) -> Sink:
    """One wandb run per run folder. Its id is kept in the folder, so that a resumed run continues the same curves."""
    temporary = run_dir / "wandb" / "tmp"
    before = tempfile.tempdir
    rmtree(temporary, ignore_errors=True)  # left by a start that was killed
    temporary.mkdir(parents=True)
    try:
        tempfile.tempdir = str(temporary)  # wandb makes its folders of media and artifacts there
        client = wandb_module()
    finally:
        tempfile.tempdir = before
    id_file = run_dir / "wandb" / "run-id.txt"
    if not id_file.is_file():
        id_file.write_text(secrets.token_hex(4))
    with announced("wandb"):
        run = client.init(
            project=os.environ.get("WANDB_PROJECT", "clipscale"),
            name=os.environ.get("WANDB_NAME") or run_dir.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            mode=mode,
            # wandb would send the command line, the console and the address of the git remote, secrets included.
            settings=client.Settings(
                silent=True, init_timeout=60, console="off", x_disable_meta=True, disable_git=True
            ),
        )
    # wandb's own step counter cannot go back when a run is resumed; our step is the x axis instead.
    run.define_metric("*", step_metric="step")

    def write(step: int, values: Mapping[str, float]) -> None:
        run.log({**values, "step": step})

    return write, run.finish
