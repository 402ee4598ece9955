"""Tab completion for bash, zsh and fish, from the table of verbs and the declared settings. The shell asks at every Tab."""

from collections.abc import Iterable
from pathlib import Path

from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.common.hardware import HARDWARE
from clipscale.config.presets import composed_defaults, group_options
from clipscale.config.setting import sections, settings_of

SETUP = {
    "bash": 'eval "$(clipscale completion bash)"  into ~/.bashrc',
    "zsh": 'eval "$(clipscale completion zsh)"  into ~/.zshrc, after compinit',
    "fish": "clipscale completion fish | source  into ~/.config/fish/config.fish",
}
"""Shell -> the line that installs its completion."""
SCRIPTS = {
    "bash": """\
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
complete -o default -F _clipscale clipscale""",
    "zsh": """\
_clipscale() {
    local candidate
    local -a whole open
    for candidate in "${(@f)$("$words[1]" completion query "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}"; do
        case "$candidate" in
            *[=.]) open+=("$candidate") ;;
            ?*) whole+=("$candidate") ;;
        esac
    done
    if (( $#whole + $#open )); then
        compadd -S '' -- $open
        compadd -- $whole
    else
        compset -P '*='
        _files
    fi
}
compdef _clipscale clipscale""",
    "fish": """\
function __clipscale_found
    set -g __clipscale_candidates (clipscale completion query (commandline -cp | string collect) 2>/dev/null)
    test -n "$__clipscale_candidates"
end
complete -c clipscale -n __clipscale_found -f -a '$__clipscale_candidates'""",
}
"""What `completion SHELL` prints. It asks `completion query LINE` for candidates, and offers files if there are none."""


def complete(line: str) -> list[str]:
    """The candidates for the last word of the command line. None for paths: the shell completes file names."""
    words = line.split()
    word = "" if line[-1:].isspace() else words.pop()
    match words[1:]:
        case []:
            options: Iterable[str] = [*VERBS, "--help", "--version"]
        case ["completion"]:
            options = SCRIPTS
        case [verb] if tools_of(verb):
            options = tools_of(verb)
        case [verb, *rest]:
            name = f"{verb} {rest[0]}" if tools_of(verb) else verb
            options = candidates(name, word) if name in TOOLS else []
    return sorted({option for option in options if option.startswith(word)})


def candidates(name: str, word: str) -> list[str]:
    """Flags after `-`, values after `=`, else groups, keys and sections; the keys of a section once it is typed."""
    tool = TOOLS[name]
    if word.startswith("-"):
        composed, sweeps = bool(tool.file), name == "train"
        return ["--help", *["--cfg", "--config-dir", "--info"] * composed, *["-m", "--multirun"] * sweeps]
    groups = list(composed_defaults(tool.file)[0]) if tool.file else []
    key, equals, value = word.partition("=")
    if equals:  # in a sweep, what is before the last comma stays
        before = word[: len(word) - len(value.rpartition(",")[2])]
        return [before + option for option in values(name, key, groups)]
    keys = [one.name + "=" for one in settings_of(tool.settings) if not one.section or "." in word]
    nested = [] if "." in word else [section + "." for section in sections(tool.settings)]
    return [*(group + "=" for group in groups), *keys, *nested]


def values(name: str, key: str, groups: Iterable[str]) -> Iterable[str]:
    """The values of a group or a key, if they can be listed."""
    declared = next((one for one in settings_of(TOOLS[name].settings) if one.name == key), None)
    if key in groups or (declared and key == "model"):  # the benchmarks take a preset's name
        return group_options()[key]
    if declared is None:
        return []
    if declared.kind is bool:
        return ["true", "false"]
    if key == "hardware":
        return [*HARDWARE, "cpu"]
    if key in ("run", "against") and not declared.default:  # the doctor's is a folder for runs
        return runs()
    return declared.choices or ()


def runs() -> list[str]:
    """The runs under runs/ as `run=` accepts them: by name, a sweep's by path."""
    folders = [file.parent for pattern in ("*/config.yaml", "*/*/config.yaml") for file in Path("runs").glob(pattern)]
    return [folder.name if folder.parent == Path("runs") else str(folder) for folder in folders]
