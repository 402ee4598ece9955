"""`clipscale completion SHELL` prints a script for a shell; with the beginning of a line, the words that may end it."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from glob import escape, glob
from pathlib import Path

from clipscale.cli.verbs import VERBS, Verb, split_verb
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.units import one_of
from clipscale.config.presets import default_choices, group_options
from clipscale.config.setting import settings_of

SCRIPTS: dict[str, str] = files.read_yaml(Path(__file__).with_suffix(".yaml"))
FLAGS = ("--help", "--cfg", "--config-dir", "-m")


def main(words: Sequence[str]) -> int:
    """Print the script of a shell; or, for one that completes a line, what may end the line, one each. `words`: the
    shell, the line after the program's name, and characters at which the shell begins a new word. Raises UserError.
    """
    shell, *asked = words or [""]
    if shell not in SCRIPTS:
        raise UserError(f"completion {shell}: give a shell, {one_of(SCRIPTS)}")
    if not asked:
        print(SCRIPTS[shell], end="")
        return 0
    *before, word = tokens(asked[0])
    start = max((word.rfind(mark) + 1 for mark in "=:" if mark in "".join(asked[1:])), default=0)
    for found in dict.fromkeys(candidates(before, word)):
        if found.isprintable():
            print(found[start:])
    return 0


def tokens(line: str) -> list[str]:
    """The words of a line as the shell takes them; the last one may be empty."""
    for end in ("", "'", '"', "\\"):
        with suppress(ValueError):  # a quote that is still open
            return shlex.split(f"{line}{end}") + [""] * (not end and line[-1:] in " ")
    return [""]


def candidates(before: Sequence[str], word: str) -> Iterable[str]:
    """What may stand in the place of the last word of a line."""
    verbs = [name.split() for name in VERBS]
    longer = [name[len(before)] for name in verbs if name[: len(before)] == before and len(name) > len(before)]
    if longer:
        return beginning(word, longer)
    try:
        name, others = split_verb(before)
    except UserError:
        return []
    return of_verb(VERBS[name], others, word)


def beginning(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]


def of_verb(verb: Verb, others: Sequence[str], word: str) -> Iterator[str]:
    """What may stand in the place of a word after a verb; `others`: the words between them."""
    key, equals, _ = word.partition("=")
    declared = settings_of(verb.settings)
    groups = {group: group_options()[group] for group in default_choices(verb.conf)}
    if equals:
        setting = declared.get(key)
        lead = word[: max(map(word.rfind, "=,[")) + 1]  # several values are completed one by one
        start = word[len(lead) :]
        values = [*groups.get(key, ()), *(setting.choices if setting else ())]
        if setting and setting.kind is bool:
            values = ["true", "false"]
        elif key == "data" or (setting and setting.kind in (str, list) and not setting.choices):
            values += paths(start) + runs() * (key == "run")
        yield from (lead + value for value in beginning(start, values))
        return
    end = "" if "--help" in others else "="
    for name in beginning(word, [*groups, *declared]):  # section by section
        head, dot, _ = name[len(word) :].partition(".")
        yield f"{word}{head}{dot or end}"
    if word.startswith("-"):
        yield from beginning(word, FLAGS)
    elif "|" in verb.words:
        yield from beginning(word, verb.words.split("|"))
    elif verb.words:
        yield from paths(word) + beginning(word, runs()) * (verb.words == "RUN...")


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").glob("*/"))


def paths(start: str) -> list[str]:
    """Files and folders whose paths begin so. Names that begin with a dot come once it is typed."""
    place = start.replace("~", str(Path.home()), 1) if start.startswith("~/") else start
    found = sorted(glob(f"{escape(place)}*"))  # noqa: PTH207 - Path.glob finds names that begin with a dot, too
    return [f"{start}{path[len(place) :]}{'/' * Path(path).is_dir()}" for path in found]
