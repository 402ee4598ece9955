"""Help texts, made from the table of verbs, the declared settings and the files in conf/."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from clipscale.cli.verbs import VERBS, split_verb
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean
from clipscale.config.parse import as_typed
from clipscale.config.presets import default_choices, group_options, preset_title
from clipscale.config.setting import Setting, sections_of, settings_of, summary

# Most columns of a help text; longer lines are hard to read.
WIDTH = 120
COUNTS = "Counts are binary: 32k = 32,768, 1M = 1,048,576; with decimals, and in B, decimal: 12.8M, 13B."


def show_help(words: Sequence[str]) -> None:
    """Print what `clipscale WORDS --help` prints. It depends on the words:

    - none: all verbs;
    - the beginning of several verbs, as `data`: these;
    - a verb: its main keys;
    - a verb and names of sections or settings: all keys of these sections, and these settings.
    """
    if not words or begins_several(words):
        show_verbs([name for name in VERBS if name.split()[: len(words)] == list(words)])
        return
    name, topics = split_verb(words)
    for topic in topics:
        show_section(name, topic)
    if not topics:
        show_verb(name)


def begins_several(words: Sequence[str]) -> bool:
    """Whether the words are the beginning of several verbs, as `data` is."""
    return sum(name.split()[: len(words)] == list(words) for name in VERBS) > 1


def show_verbs(names: Sequence[str]) -> None:
    print("clipscale: contrastive image-text pretraining at any batch size\n")
    print("Usage: clipscale VERB [KEY=VALUE ...]\n")
    columns((name, summary(VERBS[name].settings)) for name in names)
    first = [VERBS[name].examples.splitlines()[0] for name in names]
    show_examples("\n".join(first) if len(names) < len(VERBS) else f"clipscale data demo\n{VERBS['train'].examples}")
    print("\n`clipscale VERB --help` describes a verb. CLIPSCALE_DEBUG=1 shows tracebacks.")


def show_verb(name: str) -> None:
    """Print a verb's top-level keys, and the often used ones of its sections."""
    verb = VERBS[name]
    print(f"clipscale {name}: {summary(verb.settings)}\n")
    print(f"Usage: clipscale {name} {verb.plain_words} [KEY=VALUE ...]\n".replace("  ", " "))
    declared = settings_of(verb.settings)
    top = [setting for key, setting in declared.items() if "." not in key]
    describe([*top, *(declared[key] for key in verb.common_keys.split())])
    if sections := sections_of(verb.settings):
        print(f"\nSections: `clipscale {name} --help SECTION` lists their keys, `--help KEY` explains one")
        columns((f"{section}.", summary(config)) for section, config in sections.items())
    if chosen := default_choices(verb.conf):
        print("\nGroups: named sets of values, from conf/ (* the default)")
        options = group_options()
        for group, choice in chosen.items():
            options[group] = [f"{option}*" if option == choice else option for option in options[group]]
        columns((f"{group}=", ", ".join(options[group])) for group in chosen)
    show_examples(verb.examples)
    print()
    for line in (COUNTS, *verb.notes.splitlines()):
        print(textwrap.fill(line, terminal_width(), break_on_hyphens=False))


def show_section(name: str, section: str) -> None:
    """Print one setting, or all keys of a section and the presets of the group of that name."""
    verb = VERBS[name]
    sections = sections_of(verb.settings)
    groups = default_choices(verb.conf)
    meaning = dict.fromkeys(groups, "whole sets of settings") | {
        key: summary(config) for key, config in sections.items()
    }
    declared = settings_of(verb.settings)
    shown = [setting for key, setting in declared.items() if f"{key}.".startswith(f"{section}.")]
    if not shown and section not in meaning:
        names = [*meaning, *declared]
        raise UserError(f"{name} --help {section}: no such section or setting{did_you_mean(section, names)}")
    if section in meaning:
        print(f"{section}: {meaning[section]}")
    describe(shown)
    if section in groups:
        columns((f"{section}={option}", preset_title(section, option)) for option in group_options()[section])


def show_examples(text: str) -> None:
    print("\nExamples\n" + textwrap.indent(text, "  "))


def terminal_width() -> int:
    return min(shutil.get_terminal_size((110, 24)).columns, WIDTH)


def describe(declared: Iterable[Setting]) -> None:
    """Print keys with their defaults, help and choices."""
    columns((setting.name, typed_default(setting.default), setting.meaning) for setting in declared)


def typed_default(default: object) -> str:
    """A default as a user types it; empty if there is none. A list of one value is that value."""
    if isinstance(default, list) and len(default) == 1:
        return as_typed(default[0])
    return "" if default in (None, "", [], {}) else as_typed(default)


def columns(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of equally many cells, aligned. The last column is wrapped at the terminal's width."""
    rows = list(rows)
    widths = [max(map(len, cells)) + 2 for cells in zip(*rows)]
    wrapper = textwrap.TextWrapper(terminal_width(), break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * (2 + sum(widths[:-1]))
    for *cells, text in rows:
        wrapper.initial_indent = "  " + "".join(map(str.ljust, cells, widths))
        print(wrapper.fill(text))
