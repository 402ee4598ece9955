"""Configuration files may come from strangers, so they choose values and start no code.

Hydra can start code from many of its own settings. Here its loader refuses these, or accepts them from the command line alone.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import hydra._internal.hydra as internal
import omegaconf._utils as omegaconf_utils
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins import file_config_source
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.base import Container, Node

from clipscale.common import files
from clipscale.common.errors import UserError

TARGETS = re.compile(
    r"hydra\._internal\.core_plugins\.(basic_launcher\.BasicLauncher|basic_sweeper\.BasicSweeper)"
    r"|hydra_plugins\.hydra_submitit_launcher\.submitit_launcher\.(Local|Slurm)Launcher"
    r"|hydra_plugins\.hydra_optuna_sweeper\.optuna_sweeper\.OptunaSweeper"
    r"|optuna\.samplers\.[A-Z]\w*"
)
"""The classes that a configuration may name."""
NEVER = ("hydra.callbacks", "hydra.job_logging.root", "hydra.hydra_logging.root")
"""Settings that start code, and that clipscale does not use."""
TYPED = (
    "data.allow_pipe", "model.hub", "hub", "hydra.job.env_set", "hydra.sweeper.custom_search_space",
    "hydra.sweeper.storage",
    *(f"hydra.launcher.{name}" for name in ("setup", "python", "srun_args", "additional_parameters")),
)  # fmt: skip
"""Settings that run commands, load what a description names, or change the workers' environment: only the command line may give them."""
MOST_BYTES, MOST_NODES, MOST_DEPTH = 1 << 20, 1 << 17, 100
"""Size of a configuration file, values in it, and nested brackets. Ours have 50; a list of ten thousand shards fits."""
SEPARATORS = (",", ":", "\n", "[", "{", "- ")
"""Characters of which YAML has one for each value, at least."""
MOST_REFERENCES = 1 << 12
"""`${...}` in a file. OmegaConf takes up to a millisecond for each."""
MOST_WORK = 1 << 21
"""What all `${...}` of a composition may come to: LOOKUP for each time that one is resolved, 64 for each value, one for a character."""
LOOKUP = 1 << 12
"""OmegaConf takes up to ten milliseconds to resolve one. Ours are resolved five times."""


class Budget:
    """Bounds what interpolations stand for: a setting may name another several times, and that one others."""

    def __init__(self) -> None:
        self.left, self.watches = MOST_WORK, False

    def begin(self) -> None:
        """A composition begins."""
        self.left = MOST_WORK
        for name in ("resolve_parse_tree", "_resolve_node_interpolation", "_evaluate_custom_resolver"):
            if not self.watches:
                setattr(Container, name, self.watched(getattr(Container, name)))
        self.watches = True

    def watched(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """One of OmegaConf's methods that look something up, with its result counted."""

        def resolve(*given: Any, **named: Any) -> Any:
            found = inner(*given, **named)
            self.take(found)
            return found

        return resolve

    def take(self, found: Any) -> None:
        """Raise UserError if the values of this interpolation and of all before are too many."""
        nodes = [found]
        self.left -= LOOKUP
        while nodes and self.left >= 0:
            node = nodes.pop()
            value = node._value() if isinstance(node, Node) else node
            self.left -= 64
            if isinstance(value, str | bytes):
                self.left -= len(value)
            elif isinstance(value, dict | list) and len(value) <= self.left:
                nodes += value.values() if isinstance(value, dict) else value
            elif isinstance(value, dict | list):
                self.left = -1
        if self.left < 0:
            raise UserError(
                "the configuration's interpolations, ${...}, stand for too many values; write fewer of them"
            )


BUDGET = Budget()


class Loader(ConfigLoaderImpl):
    """Hydra's loader, for every run and every job of a sweep."""

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *given: Any, **named: Any
    ) -> DictConfig:
        BUDGET.begin()
        found = super().load_configuration(config_name, overrides, *given, **named)
        refuse(found, overrides)
        return found


def install() -> None:
    """Make Hydra use this loader. A launcher plugin's processes unpickle it, and so check their jobs too."""
    vars(internal)["ConfigLoaderImpl"] = Loader  # Hydra has no public way to choose it
    # It would compose everything once more, to see whether a file asks for a sweep. -m alone does.
    setattr(internal.Hydra, "get_mode", lambda hydra, config_name, overrides: None)  # noqa: B010
    vars(file_config_source)["open"] = _regular
    vars(omegaconf_utils)["get_yaml_loader"] = _bounded_loader


def _regular(path: str, encoding: str) -> IO[str]:
    """A configuration file, which is UTF-8. Raises UserError for one that is no regular file, too large or too deep."""
    with files.reported("configuration", path, "take it away"):
        text, depth = files.read_text(path, MOST_BYTES), 0
        if text.count("${") > MOST_REFERENCES:
            raise ValueError(f"it has more than {MOST_REFERENCES} interpolations")
        if sum(map(text.count, SEPARATORS)) > MOST_NODES:  # PyYAML takes 60 us for each
            raise ValueError(f"it has more than {MOST_NODES} values")
        for bracket in re.findall(r"[\[\]{}]", text):  # PyYAML takes the square of the depth
            depth += 1 if bracket in "[{" else -1
            if depth > MOST_DEPTH:
                raise ValueError(f"it has more than {MOST_DEPTH} nested brackets")
        return io.StringIO(text)


def _bounded_loader() -> Any:
    """OmegaConf's YAML loader, with a bound on what aliases stand for: OmegaConf copies each of them."""

    kind: Any = get_yaml_loader()

    class Bounded(kind):
        def __init__(self, stream: Any) -> None:
            with _one_line():
                super().__init__(stream)

        def get_single_node(self) -> Any:
            with _one_line():
                node = super().get_single_node()
                if node is not None:
                    _measure(node, {})
                return node

    return Bounded


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise UserError("a configuration file is nested too deeply") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"a configuration file is no YAML ({reason})") from error


def _measure(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Nodes of a YAML tree, those of an alias each time. Raises UserError for more than MOST_NODES."""
    if id(node) not in sizes:
        sizes[id(node)] = MOST_NODES + 1  # as long as it is being measured: a node within itself
        parts = node.value if not isinstance(node, yaml.ScalarNode) else []
        children = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
        sizes[id(node)] = 1 + sum(_measure(one, sizes) for one in children)
    if sizes[id(node)] > MOST_NODES:
        raise UserError(f"a configuration file stands for more than {MOST_NODES} values; write fewer aliases")
    return sizes[id(node)]


def refuse(config: DictConfig, overrides: Sequence[str]) -> None:
    """Raise UserError for a configuration that would start code which `overrides`, the command line, does not name."""
    typed = [word.lstrip("+~").partition("=")[0] for word in overrides]
    for name in NEVER:
        found = OmegaConf.select(config, name, throw_on_missing=False)
        if found is not None and (found or name.endswith(".root")):  # Hydra starts logging for an empty root, too
            raise UserError(f"{name}: a configuration may not start code; take it out of the file")
    for name in TYPED:
        given = OmegaConf.select(config, name, throw_on_missing=False)
        if given and not any(name == key or key.startswith(f"{name}.") for key in typed):
            raise UserError(
                f"{name} may not be set by a file that can come from a stranger; if you want it, give {name}= as an argument"
            )
    for kind in ("hydra", "task"):
        words = OmegaConf.select(config, f"hydra.overrides.{kind}") or OmegaConf.create([])
        if any(word not in overrides for word in OmegaConf.to_container(words, resolve=False) or ()):
            raise UserError(f"hydra.overrides.{kind}: no file may set it; give the settings as arguments")
    for name, value in targets(OmegaConf.to_container(config.hydra, resolve=False), "hydra"):
        if not TARGETS.fullmatch(str(value)):
            raise UserError(
                f"{name}={value}: a configuration may not start code; there are the launchers basic and submitit, and the sweepers "
                "basic and optuna"
            )


def targets(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What Hydra or a plugin would instantiate, anywhere in a configuration, with its name."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if key == "_target_":
                yield f"{name}.{key}", value
            yield from targets(value, f"{name}.{key}")
