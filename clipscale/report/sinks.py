"""TensorBoard and wandb. A sink that fails does not stop what writes to it.

wandb sends the user's key to the host of the user's own configuration, and to no other. It also reads wandb/settings in the working
directory, which may have come with a stranger's files.
"""

import os
import re
import secrets
from collections.abc import Callable, Mapping
from configparser import ConfigParser, Error
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.sections import SinkConfig


class Sinks:
    """The sinks that the settings ask for. Whatever fails in one gives one warning, and closes it."""

    def __init__(
        self,
        run_dir: Path,
        config: SinkConfig,
        settings: Mapping[str, Any],
        message: Callable[[str], None],
        resume_step: int = 0,
    ) -> None:
        """`settings`: those of the run, for wandb. `message` prints a line."""
        self.message = message
        self._sinks: dict[str, _TensorBoard | _Wandb] = {}
        if config.tensorboard:
            self._call("tensorboard", lambda: self._sinks.update(tensorboard=_TensorBoard(run_dir, resume_step)))
        if config.wandb != "disabled":
            self._call("wandb", lambda: self._sinks.update(wandb=_Wandb(run_dir, config, settings)))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Give the values to every sink."""
        for name, sink in list(self._sinks.items()):
            self._call(name, partial(sink.write, step, values))

    def eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Give evaluation results to every sink, as `eval/SET/METRIC`."""
        self.write(step, {f"eval/{n}/{k}": float(v) for n, m in results.items() for k, v in m.items()})

    def close(self) -> None:
        """Close every sink. Safe to call twice."""
        for name in list(self._sinks):
            self._call(name, self._sinks.pop(name).close)

    def _call(self, name: str, call: Callable[[], None]) -> None:
        """Call a sink. Whatever fails in it prints one warning and closes that sink."""
        try:
            call()
        except Exception as error:
            self._sinks.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.message(f"warning: {name} failed and is off from here on ({reason})")


class _TensorBoard:
    """`values` of every record: numbers only."""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what the interrupted run wrote after the resumed step.
        folder = files.inner_folder(run_dir, "tensorboard")
        self.writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name != "step":
                self.writer.add_scalar(name if "/" in name else f"train/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """One wandb run per run folder. Its id is kept in the folder, so that a resumed run continues the same curves."""

    def __init__(self, run_dir: Path, config: SinkConfig, settings: Mapping[str, Any]) -> None:
        import wandb

        host = wandb_host()
        for folder in (Path(), run_dir):
            refuse_foreign_settings(folder, host)
        id_file = run_dir / "wandb" / "run-id.txt"
        files.inner_folder(run_dir, "wandb")
        self.run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=run_dir.name,
            id=_run_id(id_file),
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            mode=config.wandb,  # type: ignore[arg-type]
            # wandb would send the command line, and what is printed before the secrets are taken out.
            settings=wandb.Settings(silent=True, init_timeout=60, console="off", x_disable_meta=True, base_url=host),
        )
        # wandb's own step counter cannot go back when a run is resumed; our step is the x axis instead.
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self) -> None:
        self.run.finish()


def _run_id(file: Path) -> str:
    """The id in a file, or a new one that is written there. It is sent to wandb, so a link or anything else but an id is replaced."""
    with suppress(OSError), files.opened(file, most=100, follow=False) as known:
        if found := re.fullmatch(rb"\s*([a-z0-9]{1,64})\s*", known.read()):
            return found[1].decode()
    made = secrets.token_hex(4)
    files.write_text(file, made + "\n")
    return made


# ---- where wandb sends the key ----

DEFAULT_HOST = "https://api.wandb.ai"
HARMLESS = {"entity", "project"}
"""Settings that a folder may give: the names under which curves are stored."""


def _settings(file: Path) -> dict[str, str]:
    """The settings in a file of wandb's; none if there is no file. Raises UserError."""
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(files.read_text(file))
        return dict(parser.items("default")) if parser.has_section("default") else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, Error) as error:
        raise UserError(f"{file} cannot be read ({' '.join(str(error).split())}); move it away") from error


def wandb_host() -> str:
    """The host of WANDB_BASE_URL, or of the settings in the user's home (or WANDB_CONFIG_DIR), or wandb's own."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    given = os.environ.get("WANDB_BASE_URL") or _settings(folder / "settings").get("base_url") or DEFAULT_HOST
    return given.rstrip("/")


def refuse_foreign_settings(folder: Path, host: str) -> None:
    """Raise UserError for wandb settings in a folder that could send the key elsewhere, or more than names."""
    for file in (folder / "wandb" / "settings", folder / ".wandb" / "settings"):
        found = _settings(file)
        if found.get("base_url", host).rstrip("/") == host:
            found.pop("base_url", None)
        if others := sorted(set(found) - HARMLESS):
            raise UserError(
                f"{file.absolute()} sets {', '.join(others)}; wandb would follow it: move it away, or put your own settings into "
                "~/.config/wandb/settings or WANDB_BASE_URL"
            )
