"""Hydra, and nothing else of the program: arguments in, plain values out.

Every mistake comes out as a UserError of one line; Hydra's own stack traces and advice are never shown.
"""

import os
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipscale.cli.verbs import TOOLS
from clipscale.config.keys import Key, conf_dir, group_options, keys, tree
from clipscale.config.parse import explained, misnamed
from clipscale.config.renamed import current
from clipscale.errors import UserError
from clipscale.units import nearest, one_of, split

PATHS = (
    "data.train",
    "data.captions",
    "data.templates",
    "data.filter.fields",
    "data.filter.block_keys",
    "data.filter.block_urls",
    "eval.sets",
    "offload_dir",
    "out",
    "run",
    "resume",
    "checkpoint",
    "model.pretrained",
    "model.pretrained_image",
)
"""Keys whose values are paths, addresses or conditions: taken literally, so that braces, colons and spaces need no quoting for Hydra."""
SWITCHES = ("-m", "--multirun", "--resolve", "--hydra-help", "--info", "-i")
VALUED = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-name", "-cn")
"""The flags of Hydra's that are passed on, without and with a value."""
CFG = ("job", "hydra", "all")
"""What Hydra prints of the composed configuration for `--cfg`."""
NO_NAME = re.compile(r"[\d.eE+-]+|true|false", re.IGNORECASE)
"""What Hydra's grammar takes for a number or a truth value."""


# ---- arguments ----


def prepare(argv: Sequence[str], declared: Sequence[Key]) -> tuple[list[str], list[str]]:
    """Flags and overrides as Hydra wants them: paths quoted, free-form dictionaries open to new keys, one length for the other.

    Raises UserError for an unknown flag, or a word that is neither.
    """
    flags, overrides = separate(argv)
    sweep = "-m" in flags or "--multirun" in flags
    open_sections = tuple(key.name + "." for key in declared if key.type.startswith("dict"))
    result, given, groups = [], set(), group_options()
    for word in overrides:
        key, equals, value = word.partition("=")
        bare = key.lstrip("+~")
        if (renamed := current(bare, {one.name for one in declared})) != bare:
            key, bare = key.removesuffix(bare) + renamed, renamed
        if word.startswith("~") and any(bare == one.name for one in declared):
            raise UserError(f"{word}: a setting cannot be taken away; give it another value")
        given.add(bare)
        if bare in groups:  # Hydra takes a number for something else than the name of a file
            value = ",".join(quoted(part) if NO_NAME.fullmatch(part) else part for part in value.split(","))
        if bare in PATHS and equals:
            value = literal(bare, value, sweep=sweep)
        if f"{key}.".startswith(open_sections):
            key = "++" + key
        result.append(f"{key}{equals}{value}")
    for one, other in (("samples", "epochs"), ("epochs", "samples")):
        if one in given and other not in given and any(key.name == other for key in declared):
            result.append(f"{other}=null")
    return flags, result


def separate(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags and overrides apart, in whatever order they were typed."""
    flags: list[str] = []
    overrides: list[str] = []
    for word in argv:
        if flags and flags[-1] in VALUED:
            flags.append(word)
        elif word.startswith("-"):
            name = word.partition("=")[0]
            if name not in SWITCHES + VALUED:
                raise UserError(f"{word}: unknown flag{nearest(name, SWITCHES + VALUED)}")
            flags.append(word)
        elif word.partition("=")[0] and ("=" in word or word.startswith("~")):
            overrides.append(word)
        else:
            raise UserError(f"{word}: give settings as KEY=VALUE")
    if flags and flags[-1] in VALUED:
        raise UserError(f"{flags[-1]} needs a value")
    for flag, value in pairwise(flag for word in flags for flag in word.split("=", 1)):
        if flag in ("--cfg", "-c") and value not in CFG:
            raise UserError(f"{flag} {value}: choose {one_of(CFG)}")
    return flags, overrides


def literal(key: str, value: str, *, sweep: bool) -> str:
    """A path as Hydra's grammar spells it: in quotes, element by element in a list `[a,b]` or, in a sweep, in `a,b`."""
    if value in ("", "null") or value[0] in "'\"" or value.startswith("${"):
        return value
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(map(quoted, split(value[1:-1])))}]"
    parts = split(value)
    if len(parts) > 1 and not sweep:
        raise UserError(
            f"{key}={value}: several values; add -m to run them one after another, or write {key}=[A,B] for a list"
        )
    return ",".join(map(quoted, parts))


def quoted(text: str) -> str:
    if text[0] in "'\"" or text == "null":
        return text
    return "'" + text.replace("'", "\\'") + "'"


# ---- run ----


def run(
    name: str,
    argv: Sequence[str],
    job: Callable[[DictConfig], Any],
    *,
    sweep_dir: str | None = None,
) -> None:
    """Compose the file of the tool `name` with the overrides in `argv` and call `job` on it: once, or under -m for every combination.

    With `sweep_dir`, that is where the jobs' folders go. Raises UserError for whatever Hydra refuses.
    """
    tool = TOOLS[name]
    declared = keys(*tool.settings)
    flags, overrides = prepare(argv, declared)
    if sweep_dir is not None:
        overrides += sweep_overrides(overrides, sweep_dir)
    ConfigStore.instance().store(name="settings", node=tree(*tool.settings))
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"clipscale {name}", *flags, *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and leaving
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=tool.file)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, declared) from error
    finally:
        sys.argv = before[0]
        if before[1] is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)


def once(name: str, argv: Sequence[str]) -> dict[str, Any] | None:
    """The composed configuration as plain values; None where Hydra only printed something (--cfg, --info)."""
    composed: list[dict[str, Any]] = []

    def keep(config: DictConfig) -> None:
        composed.append(plain(config))

    run(name, argv, keep)
    return composed[0] if composed else None


def sweep_overrides(overrides: Sequence[str], folder: str) -> list[str]:
    """Send a sweep's runs to `folder`, each to a folder named after the values that vary."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise explain(error) from error
    fixed = [override.key_or_group for override in parsed if not override.is_sweep_override()]
    return [f"hydra.sweep.dir={quoted(folder)}", f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"]


def job_dir(varying: str, number: int) -> str:
    """A folder name for one job of a sweep: its own overrides, or its number where there are none."""
    name = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", varying).strip("-")
    if len(name) > 100:
        name = f"{name[:90]}-{zlib.crc32(varying.encode()):08x}"
    return name or str(number)


def demo_path(part: str) -> str:
    """`${demo:train}` and the like: a part of the demo set in the user's cache folder."""
    from clipscale.data.demo import paths

    found = paths()
    return found.train if part == "train" else str(found.tests[part])


# Registered on import, so that they are there in whatever process a launcher plugin runs a job.
OmegaConf.register_new_resolver("job_dir", job_dir, replace=True)
OmegaConf.register_new_resolver("demo", demo_path, replace=True)


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration with its interpolations resolved."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


# ---- mistakes ----


def explain(error: Exception, declared: Sequence[Key] = ()) -> UserError:
    """One line for what Hydra or OmegaConf refused: the setting, and the nearest valid names."""
    cause: BaseException | None = error
    while cause is not None:
        line = _explain_one(cause, [*group_options(), *(key.name for key in declared)])
        if line:
            return UserError(line)
        cause = cause.__cause__
    return UserError(" ".join(str(error).split()))


def _explain_one(error: BaseException, names: list[str]) -> str | None:
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options or ()) or group_options().get(group, [])
        return f"{group or 'config'}={choice}: unknown; choose {one_of(options)}{nearest(choice, options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read ({error.message.splitlines()[0].rstrip('.')}); put the value in quotes inside quotes"
    if ambiguous := re.search(r"Ambiguous value for argument '(.*?)' 1\.", text):
        key, _, value = ambiguous[1].partition("=")
        return (
            f"{key}={value}: several values; add -m to run them one after another, or write {key}=[{value}] for a list"
        )
    if twice := re.search(r"Multiple values for (\S+)\. ", text):
        return f"+{twice[1]}: it has a value already; leave out the +"
    if unknown := re.search(r"Could not (?:override|delete|append to config)[^']*'([^']+)'", text):
        names = [name for name in names if name != unknown[1]]  # a group of another verb
        return misnamed(unknown[1], names)
    return explained(error, names)
