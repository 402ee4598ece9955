"""`clipscale completion SHELL` prints a script for a shell; with the beginning of a line, the words that may end it."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from clipscale.cli.verbs import VERBS, Verb, split_verb
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.units import one_of
from clipscale.config.presets import default_choices, group_options
from clipscale.config.setting import nested, settings_of

SCRIPTS: dict[str, str] = files.read_yaml(Path(__file__).with_suffix(".yaml"))
FLAGS = ("--help", "-m", "--cfg", "--config-dir")


def main(words: Sequence[str]) -> int:
    """Print the script of a shell; or, for one that completes a line, what may end the line, one each. `words`: the
    shell, the line up to the cursor, and the characters that end a word in bash. Raises UserError.
    """
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        raise UserError(f"completion {shell}: give a shell, {one_of(SCRIPTS)}")
    if len(words) == 1:
        print(SCRIPTS[shell], end="")
        return 0
    typed = tokens(words[1])
    found = [word for word in candidates(typed) if word.isprintable()]
    if shell == "bash":  # which replaces the part after its last = or :, quotes nothing and adds no space
        breaks = "".join(set(words[2]) & set("=:")) if words[2:] else ""
        start = max((typed[-1].rfind(mark) + 1 for mark in breaks), default=0)
        found = [re.sub(r"([^\w@%+=:,./~-])", r"\\\1", word[start:]) + " " * (word[-1] not in "=./") for word in found]
    print(*found, sep="\n")
    return 0


def tokens(line: str) -> list[str]:
    """The words of a line after the program's name, as the shell takes them; the last one may be empty."""
    for end in ("", "'", '"', "\\"):
        with suppress(ValueError):  # a quote that is still open
            words = shlex.split(f"{line}{end}")
            break
    words += [""] * (line[-1:].isspace() and not end)
    names = [Path(word).name for word in words]
    return words[names.index("clipscale") + 1 if "clipscale" in names else 1 :] or [""]


def candidates(typed: Sequence[str]) -> list[str]:
    """What may stand in the place of the last of these words."""
    *before, word = typed
    verbs = [name.split() for name in VERBS]
    longer = [name[len(before)] for name in verbs if name[: len(before)] == before and len(name) > len(before)]
    if longer:
        return [*dict.fromkeys(beginning(word, longer))]
    with suppress(UserError):
        return [*dict.fromkeys(of_verb(VERBS[split_verb(before)[0]], before[-1], word))]
    return []


def beginning(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]


def of_verb(verb: Verb, last: str, word: str) -> Iterator[str]:
    """What may stand in the place of a word after a verb; `last`: the word before it."""
    key, equals, _ = word.partition("=")
    declared = settings_of(verb.settings)
    groups = {group: group_options()[group] for group in default_choices(verb.conf)}
    if last == "--help":
        yield from beginning(word, [*nested(verb.settings), *groups, *declared])
    elif last == "--config-dir":
        yield from paths(word)
    elif last == "--cfg":
        yield "job"
    elif word.startswith("-"):
        yield from beginning(word, FLAGS)
    elif not equals:
        for name in beginning(word, [*groups, *declared]):  # section by section
            head, dot, _ = name[len(word) :].partition(".")
            yield f"{word}{head}{dot or '='}"
        if "|" in verb.words:
            yield from beginning(word, verb.words.split("|"))
        elif verb.words:
            yield from runs_and_paths(word) if verb.words == "RUN..." else paths(word)
    else:
        setting = declared.get(key)
        lead = re.findall(r".*[=,[]", word)[0]  # several values are completed one by one
        start = word[len(lead) :]
        values = [*groups.get(key, ()), *(setting.choices if setting else ())]
        if setting and setting.kind is bool:
            values = ["true", "false"]
        found = beginning(start, values)
        if key == "data" or (setting and setting.kind in (str, list) and not setting.choices):
            found += runs_and_paths(start) if key == "run" else paths(start)
        yield from (lead + value for value in found)


def runs_and_paths(start: str) -> list[str]:
    return [*beginning(start, sorted(path.name for path in Path("runs").glob("*/"))), *paths(start)]


def paths(start: str) -> list[str]:
    """Files and folders whose paths begin so. Names that begin with a dot come once one is typed."""
    folder, slash, name = start.rpartition("/")
    with suppress(OSError):
        found = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
        shown = [
            path for path in found if path.name.startswith(name) and path.name.startswith(".") <= (name[:1] == ".")
        ]
        return [f"{folder}{slash}{path.name}{'/' * path.is_dir()}" for path in shown]
    return []
