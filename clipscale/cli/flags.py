"""Flags of open_clip's trainer: answered with the settings that they mean, as a command to copy."""

import shlex
from collections.abc import Collection, Sequence

from clipscale.common.errors import UserError
from clipscale.config.parse import MEANT

FLAGS = ("--multirun", "--cfg", "--config-dir")
"""Those that there are."""


def refuse_flags(verb: str, words: Sequence[str], names: Collection[str]) -> None:
    """Raise UserError for other flags than FLAGS, with the command that is meant. `names`: the verb's settings."""
    settings: dict[str, str | None] = {}
    unknown: list[str] = []
    left_out: list[str] = []
    betas = {"beta1": "0.9", "beta2": "0.98"}
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in FLAGS:
            settings[flag] = value if equals else None
            continue
        unknown.append(word)
        if not equals and left and not left[0].startswith("-") and "=" not in left[0]:
            value = left.pop(0)
        name = flag.removeprefix("--").replace("-", "_")
        if name in betas:
            betas[name] = value
            name, value = "optim.betas", f"[{','.join(betas.values())}]"
        key, fixed = meant_by(name, names)
        if not key or "..." in fixed:
            left_out.append(flag)
        elif fixed:
            settings.setdefault(key, fixed)
        else:
            settings[key] = MEANT.get(f"{key}={value}", value or "true")
    if not unknown:
        return
    samples, epochs = settings.get("samples"), settings.get("epochs")
    if samples and epochs and samples.isdecimal() and epochs.isdecimal():  # open_clip's are those of an epoch
        settings["samples"] = str(int(samples) * int(epochs))
        del settings["epochs"]
    command = shlex.join(key if value is None else f"{key}={value}" for key, value in settings.items())
    line = f"unrecognized {', '.join(unknown)}; settings have no dashes: clipscale {verb} {command}"
    if "--batch-size" in " ".join(unknown):
        line += " (batch: of all GPUs together)"
    raise UserError(f"{line}; left out: {', '.join(left_out)}" if left_out else line)


def meant_by(name: str, names: Collection[str]) -> tuple[str, str]:
    """The setting that a flag means, and its value if the flag has none; two empty texts for an unknown flag."""
    if name == "model":  # there a name, here a group
        return "model.name", ""
    if name in names:
        return name, ""
    key, _, value = MEANT.get(name, "").partition("=")
    return key, value
