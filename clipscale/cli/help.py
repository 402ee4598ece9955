"""Help texts, made from the table of verbs, the declared settings and the files in conf/, so that they are never out of
date.
"""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from clipscale.cli.verbs import TOOLS, VERBS, tools_of
from clipscale.common.errors import UserError
from clipscale.common.units import nearest, one_of
from clipscale.config.parse import as_typed
from clipscale.config.presets import about, group_options
from clipscale.config.setting import Setting, sections, settings_of, summary

SCREEN = 40
"""Most keys that a help lists in full. If a tool has more, `--help SECTION` lists those inside sections."""
WIDTH = 120
"""Most columns of a help text; longer lines are hard to read."""
COUNTS = "Counts are binary: 32k = 32,768, 1M = 1,048,576; a plain integer is itself."


def show_overview() -> None:
    """The verbs."""
    print(f"{bold('clipscale')}: contrastive image-text pretraining at any batch size\n")
    print("Usage: clipscale VERB [KEY=VALUE ...]\n")
    columns(VERBS.items())
    show_examples(
        "clipscale data demo                      # 20k captioned scenes, in under half a minute\n"
        "clipscale train experiment=demo          # train on them\n"
        "clipscale train model=vit-l14 batch=1M data.train='/data/laion/{00000..41455}.tar'"
    )
    print("\n`clipscale VERB --help` describes a verb. CLIPSCALE_DEBUG=1 shows tracebacks.")


def show_help(verb: str, topics: Sequence[str]) -> None:
    """The tools of a verb, or the tool that `topics` begin with; of a tool, its keys, or all keys of the sections
    named.
    """
    tools = tools_of(verb)
    if not tools:
        show_tool(verb, topics)
    elif not topics:
        show_tools(verb, tools)
    elif topics[0] in tools:
        show_tool(f"{verb} {topics[0]}", topics[1:])
    else:
        raise UserError(f"{verb} {topics[0]}: unknown{nearest(topics[0], tools)}; there is {', '.join(tools)}")


def show_tools(verb: str, tools: Sequence[str]) -> None:
    """Each tool with its purpose."""
    print(f"Usage: clipscale {verb} TOOL [KEY=VALUE ...]\n")
    columns((tool, purpose(f"{verb} {tool}")) for tool in tools)
    show_examples("\n".join(TOOLS[f"{verb} {tool}"].examples.partition("\n")[0] for tool in tools))
    print(f"\n`clipscale {verb} TOOL --help` describes a tool.")


def show_tool(name: str, topics: Sequence[str]) -> None:
    """The keys of a tool, or those of the sections `topics`.

    Of many keys, those inside sections only if they are often set.
    """
    from clipscale.cli import compose  # imports Hydra

    tool = TOOLS[name]
    declared = settings_of(tool.settings)
    defaults, choices = compose.defaults(name)
    if topics:
        for topic in topics:
            show_section(name, topic, defaults, choices)
        return
    print(f"{bold(f'clipscale {name}')}: {purpose(name)}\n")
    print("Usage:", *(word for word in (f"clipscale {name}", tool.words, "[KEY=VALUE ...]") if word), end="\n\n")
    if len(declared) <= SCREEN:
        describe(declared, defaults)
    else:
        print(f"{bold('Main keys')}, their defaults and what they mean")
        often = [setting for key in tool.often.split() for setting in declared if setting.name == key]
        describe([*(setting for setting in declared if not setting.section), *often], defaults)
        print(f"\n{bold('Sections')}: `clipscale {name} --help SECTION` lists their keys")
        columns((f"{section}.", text) for section, text in sections(tool.settings).items())
    if choices:
        print(f"\n{bold('Groups')}: named sets of values, from conf/ (* the default)")
        options = group_options()
        columns((f"{g}=", ", ".join(o + "*" * (o == choices[g]) for o in options[g])) for g in choices)
    show_examples(tool.examples)
    notes = [COUNTS] * any(setting.kind is int for setting in declared) + [tool.notes] * bool(tool.notes)
    print("\n" * bool(notes) + "\n".join(notes))


def show_section(name: str, section: str, defaults: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """All keys of a section, and the presets of the group of that name."""
    described = sections(TOOLS[name].settings)
    known = list(dict.fromkeys([*described, *choices]))
    if section not in known:
        there = f"there are {', '.join(known)}" if known else "there are none"
        raise UserError(f"{name} --help {section}: no such section{nearest(section, known)}; {there}")
    print(f"{bold(section)}: {described.get(section, 'whole sets of settings')}")
    describe((setting for setting in settings_of(TOOLS[name].settings) if setting.section == section), defaults)
    options = group_options()[section] if section in choices else []
    columns((f"{section}={option}", about(section, option)) for option in options)


def describe(declared: Iterable[Setting], defaults: Mapping[str, Any]) -> None:
    """Keys with their defaults, help and choices."""
    rows = []
    for setting in declared:
        named = all(f"`{choice}`" in setting.help for choice in setting.choices or ())
        meaning = setting.help if named else f"{setting.help} Choose {one_of(setting.choices or ())}."
        default = defaults[setting.name]
        rows.append((setting.name, "" if default in (None, "", [], {}) else as_typed(default), meaning))
    columns(rows)


def purpose(name: str) -> str:
    """What a tool does: from the docstring of its settings, or else from the table of verbs."""
    return summary(TOOLS[name].settings).partition("`: ")[2] or VERBS[name]


def columns(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of equally many cells, aligned. The last column is wrapped at the terminal's width."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        while len(table.columns) < len(row):
            table.add_column(no_wrap=len(table.columns) < len(row) - 1)
        table.add_row(*map(Text, row))
    console = Console(width=min(shutil.get_terminal_size((110, 24)).columns, WIDTH))
    with console.capture() as text:
        console.print(Padding(table, (0, 0, 0, 2)))
    for line in text.get().splitlines():
        print(line.rstrip())


def show_examples(lines: str) -> None:
    """Commands, indented."""
    print(f"\n{bold('Examples')}")
    print(textwrap.indent(lines, "  "))


def bold(text: str) -> str:
    """Bold on a terminal."""
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text
