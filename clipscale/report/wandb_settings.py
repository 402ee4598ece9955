"""Where wandb sends the user's key: to the host of the user's own configuration, and to no other.

wandb also reads wandb/settings in the working directory, which may have come with a stranger's files.
"""

import os
from configparser import ConfigParser, Error
from pathlib import Path

from clipscale import files
from clipscale.errors import UserError

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
