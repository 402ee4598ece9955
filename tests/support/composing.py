"""Hydra's composition of presets, once for each choice of them; the values of settings are set in a copy of it. All
processes of a session share the compositions, in its cache (conftest.py).

Hydra takes a fifth of a second for each command. Slow tests, those of presets and those of how words compose use it as
users do (`hydra_itself` in tests/conftest.py).
"""

import hashlib
import os
import pickle
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: TID251
from hydra.errors import HydraException  # noqa: TID251
from omegaconf import OmegaConf  # noqa: TID251
from omegaconf.errors import OmegaConfBaseException  # noqa: TID251

from clipscale.cli.compose import compose_config
from clipscale.cli.verbs import VERBS
from clipscale.common.files import replacing
from clipscale.config.presets import default_choices

COMPOSED = Path(os.environ["XDG_CACHE_HOME"]) / "composed"


@cache
def presets_composed(name: str, presets: tuple[str, ...]) -> Any:
    file = COMPOSED / hashlib.sha256(repr((name, presets)).encode()).hexdigest()
    if not file.exists():
        COMPOSED.mkdir(parents=True, exist_ok=True)
        with replacing(file) as part:
            pickle.dump(compose_config(name, presets), part)
    return pickle.loads(file.read_bytes())


def compose_once(name: str, changes: Sequence[str], *, with_hydra: bool = False) -> Any:
    """What `compose_config` returns. Hydra's own settings, sweeps and wrong words are for Hydra itself."""
    if with_hydra or any(word.startswith("hydra") for word in changes):
        return compose_config(name, changes, with_hydra=with_hydra)
    groups = default_choices(VERBS[name].conf)
    presets = tuple(word for word in changes if word.partition("=")[0] in groups)
    try:
        overrides = OverridesParser.create().parse_overrides([word for word in changes if word not in presets])
        if any(override.is_sweep_override() or override.is_delete() for override in overrides):
            return compose_config(name, changes)
        tree = deepcopy(presets_composed(name, presets))
        for override in overrides:
            OmegaConf.update(tree, override.key_or_group, override.value(), force_add=override.is_force_add())
    except (HydraException, OmegaConfBaseException):
        return compose_config(name, changes)
    return tree
