"""Help texts and Tab completion, made from the declared keys and the files in conf/, so that they cannot go out of date."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml

from clipscale.errors import UserError
from clipscale.keys import Key, conf_dir, flat, group_options, keys, meaning
from clipscale.spelling import nearest

TRAIN = ("clipscale.config", "TrainConfig")
EVAL = ("clipscale.eval.verb", "EvalRunConfig")
PLAN = ("clipscale.plan.config", "PlanConfig")
FEATURES = ("clipscale.features", "FeaturesConfig")
SMALL = {
    "data demo": ("clipscale.cli", "DemoSettings"),
    "data index": ("clipscale.data.tools", "IndexSettings"),
    "data check": ("clipscale.data.tools", "CheckSettings"),
    "data stats": ("clipscale.data.tools", "StatsSettings"),
    "data features": FEATURES,
    "bench loss": ("clipscale.bench.loss", "LossBenchSettings"),
    "bench step": ("clipscale.bench.step", "StepBenchSettings"),
    "bench data": ("clipscale.bench.data", "DataBenchSettings"),
    "report": ("clipscale.cli", "ReportSettings"),
    "export": ("clipscale.export", "ExportSettings"),
    "doctor": ("clipscale.doctor", "DoctorSettings"),
    "eval": EVAL,
}
"""Where the keys of the other verbs are declared."""
MAIN = (
    "model.name",
    "data.train",
    "data.workers",
    "optim.lr",
    "cache.chunk",
    "eval.sets",
    "eval.every",
    "checkpoint.every",
    "launch.procs",
)
"""Keys inside sections that most people set; shown beside the top-level ones."""

TRAIN_EXAMPLES = """\
clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'
clipscale train experiment=openclip-vit-b32-laion400m data.train='/data/laion/*.tar' run=b32
clipscale train experiment=demo run=demo samples=20k
clipscale train -m model=vit-b32,vit-b16 batch=32k,64k,128k run=sizes         # a sweep: six runs, one table
torchrun --nproc-per-node 8 -m clipscale train batch=64k data.train=...       # several machines: see launch/"""

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


# ---- help ----


def show_overview(verbs: dict[str, str]) -> None:
    print(f"{bold('clipscale')}: contrastive image-text pretraining at any batch size\n")
    print("Usage: clipscale VERB [KEY=VALUE ...]\n")
    columns(verbs.items())
    examples(
        "clipscale data demo                      # 20k captioned scenes, in under half a minute\n"
        "clipscale train experiment=demo          # train on them\n"
        "clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'"
    )
    print(
        "\n`clipscale VERB --help` tells more, `clipscale --version` the version. CLIPSCALE_DEBUG=1 shows tracebacks."
    )


def show_train(topics: Sequence[str]) -> None:
    """The main keys, or with `topics` all keys of those sections."""
    sections = meaning(*TRAIN)
    choices, values = composed_defaults()
    if topics:
        for topic in topics:
            show_section(topic)
        return
    declared = [k for k in keys(*TRAIN) if not k.section] + [k for name in MAIN for k in keys(*TRAIN) if k.name == name]
    print(f"{bold('clipscale train')}: train a model, or go on with a run\n")
    print("Usage: clipscale train [KEY=VALUE ...] [-m] [--cfg job] [--config-dir DIR]\n")
    print(f"{bold('Main keys')}, their defaults and what they mean")
    describe(declared, values)
    print("  Counts are binary: 32k = 32,768, 1M = 1,048,576; a plain integer is itself.\n")
    show_groups(choices)
    print(f"\n{bold('Sections')}: `clipscale train --help SECTION` lists their keys")
    columns((f"{name}.", text) for name, text in sections.items())
    examples(TRAIN_EXAMPLES)
    print(
        "\n-m runs every combination of the comma-separated values. --cfg job prints the composed configuration instead of\n"
        "training. --config-dir DIR adds group files of your own, DIR/experiment/mine.yaml for one."
    )


def show_section(name: str) -> None:
    """All keys of a section, and the files of the group of that name."""
    sections, groups = meaning(*TRAIN), group_options()
    if name not in sections and name not in groups:
        known = [*sections, *(group for group in groups if group not in sections)]
        raise UserError(f"train --help {name}: no such section{nearest(name, known)}; there are {', '.join(known)}")
    print(f"{bold(name)}: {sections.get(name, 'whole sets of settings')}")
    describe((key for key in keys(*TRAIN) if key.section == name), composed_defaults()[1])
    columns((f"{name}={option}", about(name, option)) for option in groups.get(name, []))
    print()


def show_eval(topics: Sequence[str]) -> None:
    show_small(
        "eval",
        "clipscale eval run=demo\n"
        "clipscale eval run=b32 'eval.sets=[/data/imagenet1k,/data/mscoco_captions]' precision=bf16\n"
        "clipscale eval run=runs/b32 checkpoint=20000 eval.limit=1k",
    )


PLAN_EXAMPLES = """\
clipscale plan model=vit-l14 batch=4M hardware=a800-80g gpus=8
clipscale plan experiment=infcl-vit-l14 batch=1M hardware=h100-80g gpus=8 nodes=4 host=1024G json=true
clipscale plan run=b16                                                        # beside what that run has measured"""


def show_plan(topics: Sequence[str]) -> None:
    """The keys of the machine, or with `topics` those of a section of a run's settings."""
    for topic in topics:
        show_section(topic)
    if topics:
        return
    shared = {key.name for key in keys(*TRAIN)} - {"batch", "run"}
    print("Usage: clipscale plan [KEY=VALUE ...]\n")
    describe(key for key in keys(*PLAN) if key.name not in shared)
    print(
        "\n  and every group and key of `clipscale train` (`clipscale train --help`); data.train is not needed. Status 1: does not fit."
    )
    examples(PLAN_EXAMPLES)


DATA_EXAMPLES = {
    "demo": "clipscale data demo root=/tmp/demo samples=5000 seed=1",
    "index": "clipscale data index '/data/laion/{00000..41455}.tar'\nclipscale data index @shards.txt cache=/scratch/index",
    "check": "clipscale data check '/data/laion/{00000..00099}.tar' filter.min_side=64 'filter.fields=[similarity>=0.3]'",
    "stats": "clipscale data stats '/data/laion/*.tar'",
    "features": "clipscale data features model=vit-b16 model.pretrained_image=b16.pt data.train='/data/laion/*.tar' out=/data/b16\n"
    "clipscale train model=vit-b16 model.pretrained_image=b16.pt model.freeze_image=true data.train=/data/b16 data.image_features=true",
}


def show_data(topics: Sequence[str]) -> None:
    show_tools("data", DATA_EXAMPLES, topics, words=dict.fromkeys(("index", "check", "stats"), " SHARD..."))


def show_tools(verb: str, known: dict[str, str], topics: Sequence[str], words: dict[str, str] | None = None) -> None:
    """The keys of a verb's tools: of those named, or of all."""
    for topic in topics:
        if topic not in known:
            raise UserError(f"{verb} {topic}: unknown{nearest(topic, known)}; there is {', '.join(known)}")
    for number, topic in enumerate(topics or known):
        if number:
            print()
        show_small(f"{verb} {topic}", known[topic], (words or {}).get(topic, ""))


def show_report(topics: Sequence[str]) -> None:
    show_small("report", "clipscale report run=demo")


def show_export(topics: Sequence[str]) -> None:
    show_small(
        "export", "clipscale export run=b32\nclipscale export run=b32 checkpoint=20000 dtype=float16 out=/models/b32"
    )


def show_doctor(topics: Sequence[str]) -> None:
    show_small("doctor", "clipscale doctor\nclipscale doctor run=/scratch/runs")


BENCH_EXAMPLES = {
    "loss": "clipscale bench loss n=4k,8k methods=infcl,open_clip\n"
    "clipscale bench loss n=8k,64k,1M d=768 dtype=bf16 methods=infcl,open_clip,inf_cl device=cuda\n"
    "clipscale bench loss n=2k ranks=4 methods=clip,openclip,disco,ring,infcl",
    "step": "clipscale bench step\n"
    "clipscale bench step model=vit-b16 precision=bf16 batch=32k chunk=256 memory= methods=plain@max,cache,cache@256k seconds=300\n"
    "clipscale bench step methods=cache,keep-30,frozen batch=1k chunk=256",
    "data": "clipscale bench data\nclipscale bench data sizes=512 stream=512 workers=8 batch=1k",
}


def show_bench(topics: Sequence[str]) -> None:
    show_tools("bench", BENCH_EXAMPLES, topics)


def show_completion(topics: Sequence[str]) -> None:
    print('Tab completion for bash; put this into ~/.bashrc:\n\n  eval "$(clipscale completion bash)"')


def show_small(verb: str, example: str, words: str = "") -> None:
    """The keys of a verb, and the groups of one that is composed from a file of its name in conf/."""
    print(f"Usage: clipscale {verb}{words} [KEY=VALUE ...]\n")
    name = verb.rpartition(" ")[2]
    composed = (conf_dir() / f"{name}.yaml").is_file()
    choices, values = composed_defaults(name) if composed else ({}, {})
    describe(keys(*SMALL[verb]), values)
    if composed:
        print()
        show_groups(choices, everywhere=False)
    examples(example)


def describe(declared: Iterable[Key], values: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Keys with their defaults, those of conf/ (`values`) before the dataclasses', and their meanings."""
    columns((key.name, shown(values.get(key.name, key.default)), spoken(key.doc)) for key in declared)


def show_groups(choices: dict[str, str], *, everywhere: bool = True) -> None:
    """The groups with their files; not `everywhere`: those that have a default."""
    groups = [(g, names) for g, names in sorted(group_options().items()) if everywhere or g in choices]
    print(f"{bold('Groups')}: named sets of values, from conf/ (* the default)")
    columns((f"{g}=", ", ".join(o + "*" * (o == choices.get(g)) for o in names)) for g, names in groups)


def composed_defaults(name: str = "train") -> tuple[dict[str, str], dict[str, Any]]:
    """The group choices that conf/`name`.yaml makes, and by dotted key what these set and, over them, the file itself."""
    file: dict[str, Any] = yaml.safe_load((conf_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in file.pop("defaults") if isinstance(entry, dict)]
    choices = {g: option for entry in entries for g, option in entry.items() if option and not g.startswith("override")}
    values: dict[str, Any] = {}
    for group, option in choices.items():
        text = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8")
        values |= flat(yaml.safe_load(text), "" if text.startswith("# @package _global_") else group + ".")
    return choices, values | dict(flat(file))


def about(group: str, option: str) -> str:
    """The first comment of a group's file."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ") and not line.startswith("# @")), "")


def spoken(doc: str) -> str:
    """A docstring in the command line's words."""
    return doc.replace("None:", "null:")


def shown(value: object) -> str:
    """A default as one would type it; nothing for what is unset."""
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(shown, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def columns(rows: Iterable[Sequence[str]]) -> None:
    """Rows of equally many cells, aligned; the last cell is wrapped to the terminal's width."""
    table = list(rows)
    if not table:
        return
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    start = 2 + sum(width + 2 for width in widths if width)
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    for *cells, last in table:
        head = "  " + "".join(cell.ljust(w) + "  " for cell, w in zip(cells, widths) if w)
        lines = textwrap.wrap(last, max(30, width - start)) or [""]
        print((head + lines[0]).rstrip())
        for line in lines[1:]:
            print(" " * start + line)


def examples(lines: str) -> None:
    print(f"\n{bold('Examples')}")
    print(textwrap.indent(lines, "  "))


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


# ---- completion ----


def complete(line: str, verbs: Sequence[str]) -> list[str]:
    """What the last word of the command line may become. Nothing for paths: the shell completes file names itself."""
    words = line.split()
    word = "" if line[-1:].isspace() else words.pop()
    given = words[1:]
    if not given:
        return starting(word, [*verbs, "--help", "--version"])
    if given[0] in ("train", "plan"):
        return complete_train(word, TRAIN if given[0] == "train" else PLAN)
    tools = [name.partition(" ")[2] for name in SMALL if name.startswith(given[0] + " ")]
    if tools and len(given) == 1:
        return starting(word, tools)
    if given[0] == "completion":
        return starting(word, ["bash"])
    small = SMALL.get(" ".join(given[: 2 if tools else 1]))
    return starting(word, [key.name + "=" for key in keys(*small)]) if small else []


def complete_train(word: str, settings: tuple[str, str]) -> list[str]:
    """Groups, keys and sections step by step; after `=`, a group's files or true and false."""
    groups, declared = group_options(), keys(*settings)
    if word.startswith("-"):
        return starting(word, ["-m", "--multirun", "--cfg", "--config-dir", "--help", "--info"])
    name, equals, value = word.partition("=")
    if not equals:
        sections = [] if "." in word else [section + "." for section in meaning(*settings)]
        flat = [key.name + "=" for key in declared if not key.section or "." in word]
        return starting(word, [*(group + "=" for group in groups), *flat, *sections])
    key = next((key for key in declared if key.name == name), None)
    options = groups.get(name) or (["true", "false"] if key and key.type == "bool" else [])
    before = word[: len(word) - len(value.rpartition(",")[2])]  # in a sweep, what stands before the last comma stays
    return starting(word, [before + option for option in options])


def starting(word: str, options: Iterable[str]) -> list[str]:
    return sorted({option for option in options if option.startswith(word)})
