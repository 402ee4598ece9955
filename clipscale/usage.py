"""Help texts and Tab completion, made from the declared keys and the files in conf/, so that they cannot go out of date."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clipscale.errors import UserError
from clipscale.keys import Key, conf_dir, group_options, keys, meaning
from clipscale.spelling import nearest, one_of

TRAIN = ("clipscale.config", "TrainConfig")
MAIN = ("data.train", "data.workers", "cache.chunk", "eval.sets", "eval.every", "checkpoint.every", "launch.procs", "model.name", "optim.lr")
"""Keys inside sections that most people set; shown beside the top-level ones."""

TRAIN_EXAMPLES = """\
clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'
clipscale train experiment=openclip-vit-b32-laion400m data.train='/data/laion/*.tar' run=b32
clipscale train experiment=demo run=demo samples=20k
clipscale train run=b32 experiment=openclip-vit-b32-laion400m resume=auto     # go on with it
clipscale train -m model=vit-b32,vit-b16 batch=32k,64k,128k run=sizes         # a sweep: six runs, one table
torchrun --nproc-per-node 8 -m clipscale train batch=64k data.train=...       # several nodes: see launch/"""

BASH = """\
_clipscale() {
    local line="${COMP_LINE:0:COMP_POINT}" word candidate cut
    word="${line##*[[:space:]]}"
    cut="${word%"${COMP_WORDS[COMP_CWORD]}"}"
    # Where '=' separates words for the shell, it wants only what follows it.
    [[ "${COMP_WORDS[COMP_CWORD]}" == "=" ]] && cut="$word"
    COMPREPLY=()
    while IFS= read -r candidate; do
        [[ -n "$candidate" ]] && COMPREPLY+=("${candidate#"$cut"}")
    done < <("${COMP_WORDS[0]}" completion query "$line" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -F _clipscale clipscale"""


def console() -> Console:
    """Plain lines of at most 110 columns where the output is no terminal."""
    probe = Console(highlight=False)
    return Console(highlight=False, width=min(probe.width, 110) if probe.is_terminal else 110)


def show_overview(verbs: dict[str, str]) -> None:
    out = console()
    out.print("[bold]clipscale[/bold]: contrastive image-text pretraining at any batch size\n")
    out.print("Usage: clipscale VERB [KEY=VALUE ...]\n")
    table = _columns()
    for name, summary in verbs.items():
        table.add_row(f"  [bold]{name}[/bold]", escape(summary))
    out.print(table)
    _examples(
        out,
        "clipscale data demo                      # 20k captioned scenes, in under half a minute\n"
        "clipscale train experiment=demo          # train on them\n"
        "clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'",
    )
    out.print("\n`clipscale VERB --help` tells more; `clipscale --version` the version. CLIPSCALE_DEBUG=1 shows tracebacks.")


def show_train(topics: Sequence[str]) -> None:
    """The main keys, or with `topics` all keys of those sections."""
    declared = keys(*TRAIN)
    sections = meaning(*TRAIN)
    groups = group_options()
    for topic in topics:
        if topic not in sections and topic not in groups:
            known = [*sections, *(g for g in groups if g not in sections)]
            raise UserError(f"train --help {topic}: no such section{nearest(topic, known)}; there are {', '.join(known)}")
        _show_section(topic, sections.get(topic, ""), [k for k in declared if k.section == topic], groups.get(topic, []))
    if topics:
        return
    out = console()
    out.print("[bold]clipscale train[/bold]: train a model, or go on with a run\n")
    out.print("Usage: clipscale train [KEY=VALUE ...] [-m] [--cfg job] [--config-dir DIR]\n")
    out.print("[bold]Main keys[/bold]  (counts are binary: 32k = 32,768, 1M = 1,048,576; a plain integer is itself)")
    table = _columns()
    for key in [k for k in declared if not k.section] + [k for name in MAIN for k in declared if k.name == name]:
        table.add_row(f"  {key.name}", escape(_described(key)))
    out.print(table)
    out.print("\n[bold]Groups[/bold]  (named sets of values, from conf/)")
    table = _columns()
    for group, options in sorted(groups.items()):
        table.add_row(f"  {group}=", ", ".join(options))
    out.print(table)
    out.print("\n[bold]Sections[/bold]  (`clipscale train --help SECTION` lists their keys)")
    table = _columns()
    for section, text in sections.items():
        table.add_row(f"  {section}.", escape(text))
    out.print(table)
    _examples(out, TRAIN_EXAMPLES)
    out.print(
        "\n-m runs every combination of the comma-separated values. --cfg job prints the composed configuration instead of training."
        "\n--config-dir DIR adds your own group files, DIR/experiment/mine.yaml for one."
    )


def show_data(topics: Sequence[str]) -> None:
    _show_small("clipscale data demo", "DemoSettings", "clipscale data demo root=/tmp/demo samples=5000 seed=1")


def show_report(topics: Sequence[str]) -> None:
    _show_small("clipscale report", "ReportSettings", "clipscale report run=demo")


def show_completion(topics: Sequence[str]) -> None:
    console().print('Tab completion for bash; put this into ~/.bashrc:\n\n  eval "$(clipscale completion bash)"')


def _show_small(command: str, class_name: str, example: str) -> None:
    out = console()
    out.print(f"Usage: {command} [KEY=VALUE ...]\n")
    table = _columns()
    for key in keys("clipscale.cli", class_name):
        table.add_row(f"  {key.name}", escape(_described(key)))
    out.print(table)
    _examples(out, example)


def _show_section(name: str, text: str, declared: Sequence[Key], options: Iterable[str]) -> None:
    out = console()
    out.print(f"[bold]{name}[/bold]  {escape(text)}")
    table = _columns()
    for key in declared:
        table.add_row(f"  {key.name}", f"[dim]{escape(key.type)}[/dim]", escape(_described(key)))
    out.print(table)
    table = _columns()
    for option in options:
        table.add_row(f"  {name}={option}", escape(about(name, option)))
    out.print(table)


def about(group: str, option: str) -> str:
    """The first comment of a group's file."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ") and not line.startswith("# @")), "")


def _described(key: Key) -> str:
    """The meaning, and the default where the meaning does not say it."""
    plain = key.default in (None, "", [], {}) or "default" in key.doc
    return key.doc.rstrip(".") + ("" if plain else f"{' ' if key.doc else ''}[{_shown(key.default)}]")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _columns() -> Table:
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)


def _examples(out: Console, lines: str) -> None:
    out.print("\n[bold]Examples[/bold]")
    for line in lines.splitlines():
        out.print(f"  {escape(line)}", soft_wrap=True)


# ---- completion ----


def complete(line: str, verbs: Sequence[str]) -> list[str]:
    """What the last word of the command line may become. Nothing for paths: the shell completes file names itself."""
    words = line.split()
    word = "" if line[-1:].isspace() else words.pop()
    given = words[1:]
    if not given:
        return _starting(word, [*verbs, "--help", "--version"])
    if given[0] == "train":
        return _complete_train(word)
    if given[0] == "data":
        return _starting(word, ["demo"] if len(given) == 1 else [k.name + "=" for k in keys("clipscale.cli", "DemoSettings")])
    small = {"report": [k.name + "=" for k in keys("clipscale.cli", "ReportSettings")], "completion": ["bash"]}
    return _starting(word, small.get(given[0], []))


def _complete_train(word: str) -> list[str]:
    groups, declared = group_options(), keys(*TRAIN)
    if word.startswith("-"):
        return _starting(word, ["-m", "--multirun", "--cfg", "--config-dir", "--help", "--info"])
    name, equals, value = word.partition("=")
    if not equals:
        whole = [group + "=" for group in groups] + [key.name + "=" for key in declared if not key.section]
        whole += [section + "." for section in meaning(*TRAIN)]
        deeper = [key.name + "=" for key in declared if key.section] if "." in word else []
        return _starting(word, whole + deeper)
    before = word[: len(word) - len(value.rpartition(",")[2])]  # in a sweep, what stands before the last comma stays
    key = next((key for key in declared if key.name == name), None)
    options = groups.get(name) or (["true", "false"] if key and key.type == "bool" else [])
    return _starting(word, [before + option for option in options])


def _starting(word: str, options: Iterable[str]) -> list[str]:
    return sorted({option for option in options if option.startswith(word)})
