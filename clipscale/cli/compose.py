"""Hydra: overrides in, plain values out.

Every mistake becomes a UserError of one line; Hydra's stack traces and advice are never shown.
"""

import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from clipscale.cli import received
from clipscale.cli.overrides import prepare, quoted, several
from clipscale.cli.verbs import TOOLS
from clipscale.common.errors import UserError
from clipscale.common.units import nearest, one_of
from clipscale.config.parse import misnamed
from clipscale.config.presets import conf_dir, group_options
from clipscale.config.redact import remember
from clipscale.config.setting import settings_of


def run(name: str, argv: Sequence[str], job: Callable[[DictConfig], Any], *, sweep_dir: str | None = None) -> None:
    """Compose the file of the tool `name` with the overrides in `argv` and call `job` on it: once, or under -m for every combination.

    `sweep_dir`: the parent of the jobs' folders. Raises UserError for whatever Hydra refuses.
    """
    tool = TOOLS[name]
    flags, overrides = prepare(tool, argv)
    if sweep_dir is not None:
        overrides += sweep_overrides(overrides, sweep_dir)
    ConfigStore.instance().store(name="settings", node=asdict(tool.settings()))
    before, sys.argv = sys.argv, [f"clipscale {name}", *flags, *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting
    try:
        received.install()
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=tool.file)(job)()
    except UserError:
        raise
    except Exception as error:  # of a file that is no configuration; `job` raises none that is not Hydra's
        raise explain(error, name) from error
    finally:
        sys.argv = before


def once(name: str, argv: Sequence[str]) -> dict[str, Any] | None:
    """The composed configuration as plain values; None if Hydra only printed something (--cfg, --info)."""
    found: list[dict[str, Any] | Exception] = []

    def job(config: DictConfig) -> None:
        try:
            found.append(plain(config))
        except Exception as error:  # raised outside the job, or Hydra prints a line of its own
            found.append(error)

    run(name, argv, job)
    for one in found:
        if isinstance(one, Exception):
            raise explain(one, name) from one
        return one
    return None


def sweep_overrides(overrides: Sequence[str], folder: str) -> list[str]:
    """Overrides that put a sweep's runs into `folder`, each in a folder named after the values that vary."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise explain(error, "train") from error
    fixed = [override.key_or_group for override in parsed if not override.is_sweep_override()]
    return [f"hydra.sweep.dir={quoted(folder)}", f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"]


def job_dir(varying: str, number: int) -> str:
    """The folder name of a sweep's job: the overrides that vary, or the job's number if there are none."""
    name = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", re.sub(r"['\"]", "", varying)).strip("-")
    if len(name) > 100:
        name = f"{name[:90]}-{zlib.crc32(varying.encode()):08x}"
    return name or str(number)


def demo_path(part: str) -> str:
    """`${demo:train}` and similar: a part of the demo set in the user's cache folder."""
    from clipscale.data.tools.demo import paths

    found = paths()
    return found.train if part == "train" else str(found.tests[part])


def variable(name: str, *default: str | None) -> str | None:
    """`${oc.env:NAME}` and `${oc.env:NAME,DEFAULT}`: as OmegaConf's own, but the value counts as a secret."""
    if name not in os.environ and not default:
        raise UserError(
            f"${{oc.env:{name}}}: the environment variable {name} is not set; export it, in every process of the run"
        )
    remember(name)
    return os.environ.get(name, *default)


def product(first: float | None, second: float | None) -> int | None:
    """`${product:A,B}`, rounded up; null if one of them is."""
    return None if first is None or second is None else math.ceil(first * second)


# Registered on import, so that every process in which a launcher plugin runs a job has them.
OmegaConf.register_new_resolver("job_dir", job_dir, replace=True)
OmegaConf.register_new_resolver("demo", demo_path, replace=True)
OmegaConf.register_new_resolver("product", product, replace=True)
OmegaConf.register_new_resolver("oc.env", variable, replace=True)


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration with its interpolations resolved."""
    received.BUDGET.begin()  # also in the process of a launcher plugin
    values: Any = OmegaConf.to_container(config, resolve=True)
    return {str(key): value for key, value in values.items()}


def explain(error: Exception, name: str) -> UserError:
    """One line for an error of Hydra or OmegaConf in a tool's settings: the setting, and the nearest valid names."""
    names = [*group_options(), *(one.name for one in settings_of(TOOLS[name].settings))]
    cause: BaseException | None = error
    while cause is not None:
        if line := _explain_one(cause, names):
            return UserError(line)
        cause = cause.__cause__
    return UserError(" ".join(str(error).split()) or type(error).__name__)


def _explain_one(error: BaseException, names: list[str]) -> str | None:
    text = " ".join(str(error).split())
    if ours := re.search(r"UserError raised while resolving interpolation: (.*?)(?: full_key:|$)", text):
        return ours[1]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options or ()) or group_options().get(group, [])
        return f"{group or 'config'}={choice}: unknown; choose {one_of(options)}{nearest(choice, options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read ({error.message.splitlines()[0].rstrip('.')}); put the value in quotes inside quotes"
    if ambiguous := re.search(r"Ambiguous value for argument '(.*?)' 1\.", text):
        key, _, value = ambiguous[1].partition("=")
        return several(key, value)
    if twice := re.search(r"Multiple values for (\S+)\. ", text):
        return f"+{twice[1]}: it has a value already; leave out the +"
    if unknown := re.search(r"Could not (?:override|delete|append to config)[^']*'([^']+)'", text):
        names = [name for name in names if name != unknown[1]]  # a group of another verb
        return misnamed(unknown[1], names)
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and error.full_key:
        return misnamed(str(error.full_key), names)
    return None
