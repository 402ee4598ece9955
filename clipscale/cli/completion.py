"""`clipscale completion SHELL` prints a script for a shell. The script calls it again with the beginning of a line."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from clipscale.cli.verbs import FLAGS, VERBS, split_verb
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import HARDWARE
from clipscale.common.text import one_of
from clipscale.config.libraries import architectures, optimizers_in_file
from clipscale.config.presets import default_choices, group_options
from clipscale.config.setting import settings_of

# Setting without a list of choices -> the names that it takes.
NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "hardware": lambda: [*HARDWARE, "cpu"],
    "model.name": architectures,
    "optim.name": optimizers_in_file,
}
SCRIPTS: dict[str, str] = files.read_yaml(Path(__file__).with_suffix(".yaml"))


def main(words: Sequence[str]) -> int:
    """Print the script of a shell, or the words that may end a line. Raises UserError.

    `words`: the shell. The script adds the beginning of a line, after the program's name. Then this prints what may end
    it, one word a line, or nothing where the name of a file may stand.
    """
    shell, *line = words or [""]
    if shell not in SCRIPTS:
        raise UserError(
            f"{f'completion {shell}'.strip()}: give a shell, {one_of(SCRIPTS)}, as in clipscale completion bash"
        )
    if not line:
        print(SCRIPTS[shell], end="")
        return 0
    words_of_line = re.split(r"(?<!\\) +", line[0])[1:]  # after the program's name; a blank of a name has a backslash
    *before, typed = words_of_line or [""]
    word = re.sub(r"\\(.)", r"\1", typed)
    for candidate in dict.fromkeys(candidates(before, word)):
        if candidate.startswith(word):
            # zsh and fish quote what they insert
            print(typed + escape(candidate[len(word) :]) if shell == "bash" else candidate)
    return 0


def escape(text: str) -> str:
    """The text with a backslash before each character that a shell interprets."""
    return re.sub(r"([^\w@%+=:,./-])", r"\\\1", text)


def candidates(before: Sequence[str], word: str) -> Iterable[str]:
    """The words that may stand after the words `before`. Settings that begin with `word` end at their next dot."""
    verbs = [name.split() for name in VERBS]
    longer = [name[len(before)] for name in verbs if name[: len(before)] == before != name]
    if longer:
        return longer
    name, _ = split_verb(before)
    verb = VERBS[name]
    declared = settings_of(verb.settings)
    presets = {group: group_options()[group] for group in default_choices(verb.conf)}
    runs = [file.parent.name for file in sorted(Path("runs").glob("*/config.yaml"))]
    key, equals, _ = word.partition("=")
    if equals:
        end_of_others = max(word.rfind(mark) for mark in "=,[")  # several values are completed one by one
        typed = word[: end_of_others + 1]
        values = presets.get(key, [])
        if key in declared:
            if key in NAMES:
                values = [*NAMES[key]()]
            elif key in ("run", "model.weights"):
                values = runs
            values = [*values, *declared[key].choices]
        return [typed + value for value in values]
    if "RUN" in verb.plain_words and runs:
        return runs
    if verb.plain_words and not word:
        return []
    end = "" if "--help" in before else "="
    up_to_dot = re.compile(rf"{re.escape(word)}[^.]*\.?")
    matches = [up_to_dot.match(key + end) for key in (*presets, *declared)]
    return [*FLAGS, "--help", *(match[0] for match in matches if match)]
