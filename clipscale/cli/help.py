"""Help texts, made from the table of verbs, the declared keys and the files in conf/, so that they cannot go out of date."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.config.keys import Key, composed_defaults, conf_dir, docstring, group_options, keys, meaning
from clipscale.errors import UserError
from clipscale.units import nearest

SCREEN = 40
"""Keys that a help lists in full; of more, those inside sections are left to `--help SECTION`."""
COUNTS = "Counts are binary: 32k = 32,768, 1M = 1,048,576; a plain integer is itself."


def show_overview() -> None:
    print(f"{bold('clipscale')}: contrastive image-text pretraining at any batch size\n")
    print("Usage: clipscale VERB [KEY=VALUE ...]\n")
    columns(VERBS.items())
    show_examples(
        "clipscale data demo                      # 20k captioned scenes, in under half a minute\n"
        "clipscale train experiment=demo          # train on them\n"
        "clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'"
    )
    print(
        "\n`clipscale VERB --help` tells more, `clipscale --version` the version. CLIPSCALE_DEBUG=1 shows tracebacks."
    )


def show_help(verb: str, topics: Sequence[str]) -> None:
    """Of a verb with tools: these, or the one that `topics` begin with; of a tool: its keys, or all keys of the sections named."""
    tools = tools_of(verb)
    if verb == "completion":
        print('Tab completion for bash; put this into ~/.bashrc:\n\n  eval "$(clipscale completion bash)"')
    elif not tools:
        show_tool(verb, topics)
    elif not topics:
        show_tools(verb, tools)
    elif topics[0] in tools:
        show_tool(f"{verb} {topics[0]}", topics[1:])
    else:
        raise UserError(f"{verb} {topics[0]}: unknown{nearest(topics[0], tools)}; there is {', '.join(tools)}")


def show_tools(verb: str, tools: Sequence[str]) -> None:
    """Each tool with what it does, its keys and sections."""
    print(f"Usage: clipscale {verb} TOOL [KEY=VALUE ...]\n")
    rows = []
    for tool in tools:
        declared = keys(*TOOLS[f"{verb} {tool}"].settings)
        names = dict.fromkeys(f"{key.section}." if key.section else key.name for key in declared)
        rows += [(tool, purpose(f"{verb} {tool}")), ("", f"Keys: {', '.join(names)}")]
    columns(rows)
    show_examples("\n".join(TOOLS[f"{verb} {tool}"].examples.partition("\n")[0] for tool in tools))
    print(f"\n`clipscale {verb} TOOL --help` tells more.")


def show_tool(name: str, topics: Sequence[str]) -> None:
    """The keys of a tool, or of its sections named; where there are many, those inside sections only if named or often set."""
    tool = TOOLS[name]
    declared, sections = keys(*tool.settings), meaning(*tool.settings)
    choices, values = composed_defaults(tool.file) if tool.file else ({}, {})
    if topics:
        for topic in topics:
            show_section(name, topic, choices, values)
        return
    words = "".join(
        f" {word}" for word in (tool.words, "[KEY=VALUE ...]", *(f"[{flag}]" for flag in tool.flags)) if word
    )
    print(f"{bold(f'clipscale {name}')}: {purpose(name)}\n\nUsage: clipscale {name}{words}\n")
    if len(declared) <= SCREEN:
        describe(declared, values)
    else:
        print(f"{bold('Main keys')}, their defaults and what they mean")
        often = [key for wanted in tool.often for key in declared if key.name == wanted]
        describe([*(key for key in declared if not key.section), *often], values)
        print(f"\n{bold('Sections')}: `clipscale {name} --help SECTION` lists their keys")
        columns((f"{section}.", text) for section, text in sections.items())
    if choices:
        options = group_options()
        print(f"\n{bold('Groups')}: named sets of values, from conf/ (* the default)")
        columns((f"{g}=", ", ".join(o + "*" * (o == choices[g]) for o in options[g])) for g in sorted(choices))
    show_examples(tool.examples)
    notes = [COUNTS] * any(key.type.startswith("int") for key in declared) + [tool.notes] * bool(tool.notes)
    print("\n" * bool(notes) + "\n".join(notes))


def show_section(name: str, section: str, choices: Mapping[str, str | None], values: Mapping[str, Any]) -> None:
    """All keys of a section, and the files of the group of that name."""
    sections = meaning(*TOOLS[name].settings)
    known = list(dict.fromkeys([*sections, *choices]))
    if section not in known:
        there = f"there are {', '.join(known)}" if known else "there are none"
        raise UserError(f"{name} --help {section}: no such section{nearest(section, known)}; {there}")
    print(f"{bold(section)}: {sections.get(section, 'whole sets of settings')}")
    describe((key for key in keys(*TOOLS[name].settings) if key.section == section), values)
    columns(
        (f"{section}={option}", about(section, option))
        for option in (group_options()[section] if section in choices else [])
    )
    print()


def describe(declared: Iterable[Key], values: Mapping[str, Any]) -> None:
    """Keys with their defaults, those of conf/ (`values`) before the dataclasses', and their meanings."""
    columns((key.name, shown(values.get(key.name, key.default)), spoken(key.doc)) for key in declared)


def purpose(name: str) -> str:
    """What the docstring of a tool's settings says that it does, or else the table of verbs."""
    return docstring(*TOOLS[name].settings).partition("`: ")[2] or VERBS[name]


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


def show_examples(lines: str) -> None:
    print(f"\n{bold('Examples')}")
    print(textwrap.indent(lines, "  "))


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text
