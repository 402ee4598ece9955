"""Flags of open_clip's trainer: answered with the settings that they mean, as a command to copy."""

import shlex
from collections.abc import Collection, Sequence

from clipscale.common.errors import UserError
from clipscale.config.parse import MEANT

FLAGS = ("--multirun", "--cfg", "--check", "--config-dir")
"""Those that there are."""


def refuse_flags(verb: str, words: Sequence[str], names: Collection[str]) -> None:
    """Raise UserError for other flags than FLAGS, with the command that is meant. `names`: the verb's settings."""
    command = {}
    unknown = []
    left_out = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, _, value = word.partition("=")
        if not flag.startswith("--") or flag in FLAGS:
            command[flag] = word
            continue
        unknown.append(word)
        if word == flag and left and not left[0].startswith("-") and "=" not in left[0]:
            value = left.pop(0)
        name = flag.removeprefix("--").replace("-", "_")
        meant = name if name in names else MEANT.get(name, "nothing here")
        key, _, fixed = meant.partition("=")
        if meant == "nothing here" or "..." in fixed:
            left_out.append(f"{flag} ({meant})")
        else:
            command[key] = f"{key}={fixed or MEANT.get(f'{key}={value}') or value or 'true'}"
    if not unknown:
        return
    meant = shlex.join(command.values())
    line = f"unrecognized {', '.join(unknown)}; settings have no dashes: clipscale {verb} {meant}"
    if left_out:
        line += f"; left out: {', '.join(left_out)}"
    if "batch" in command:
        line += "; batch: of all GPUs together"
    raise UserError(line)
