"""Tab completion, from the table of verbs, the declared keys and what these may be; light, since the shell asks at every Tab."""

from collections.abc import Iterable
from pathlib import Path

from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.config.keys import choices, composed_defaults, group_options, keys, meaning
from clipscale.hardware import HARDWARE

BASH = """\
_clipscale() {
    local line="${COMP_LINE:0:COMP_POINT}" word="${COMP_WORDS[COMP_CWORD]}" whole cut candidate
    whole="${line##*[[:space:]]}"
    # The shell splits words at '=' and wants only what follows the last split.
    if [[ "$word" == "=" ]]; then cut="$whole"; else cut="${whole%"$word"}"; fi
    COMPREPLY=()
    while IFS= read -r candidate; do
        [[ -n "$candidate" ]] && COMPREPLY+=("${candidate#"$cut"}")
    done < <("${COMP_WORDS[0]}" completion query "$line" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -F _clipscale clipscale"""


def complete(line: str) -> list[str]:
    """What the last word of the command line may become. Nothing for paths: the shell completes file names itself."""
    words = line.split()
    word = "" if line[-1:].isspace() else words.pop()
    match words[1:]:
        case []:
            options: Iterable[str] = [*VERBS, "--help", "--version"]
        case ["completion"]:
            options = ["bash"]
        case [verb] if tools_of(verb):
            options = tools_of(verb)
        case [verb, *rest]:
            name = f"{verb} {rest[0]}" if tools_of(verb) else verb
            options = candidates(name, word) if name in TOOLS else []
    return sorted({option for option in options if option.startswith(word)})


def candidates(name: str, word: str) -> list[str]:
    """Groups, keys and sections step by step; after `=`, what the key may be."""
    tool = TOOLS[name]
    if word.startswith("-"):
        return [
            "--help",
            *(["--cfg", "--config-dir", "--info"] if tool.file else []),
            *(["-m", "--multirun"] if name == "train" else []),
        ]
    groups = list(composed_defaults(tool.file)[0]) if tool.file else []
    declared = keys(*tool.settings)
    key, equals, value = word.partition("=")
    if equals:
        before = word[
            : len(word) - len(value.rpartition(",")[2])
        ]  # in a sweep, what stands before the last comma stays
        return [before + option for option in values(name, key, groups)]
    sections = [] if "." in word else [section + "." for section in meaning(*tool.settings)]
    flat = [key.name + "=" for key in declared if not key.section or "." in word]
    return [*(group + "=" for group in groups), *flat, *sections]


def values(name: str, wanted: str, groups: Iterable[str]) -> Iterable[str]:
    """What a group or a key of a tool may be, where that can be listed."""
    key = next((key for key in keys(*TOOLS[name].settings) if key.name == wanted), None)
    if wanted in groups or (key and wanted == "model"):  # the benchmarks take a preset's name
        return group_options()[wanted]
    if key is None:
        return []
    if key.type == "bool":
        return ["true", "false"]
    if wanted == "hardware":
        return [*HARDWARE, "cpu"]
    if wanted == "run" and not key.default:  # the doctor's is a folder for runs
        return runs()
    return choices().get(wanted, ())


def runs() -> list[str]:
    """The runs below runs/ as `run=` takes them: by name, a sweep's by path."""
    folders = [file.parent for pattern in ("*/config.yaml", "*/*/config.yaml") for file in Path("runs").glob(pattern)]
    return [folder.name if folder.parent == Path("runs") else str(folder) for folder in folders]
