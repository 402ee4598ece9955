"""A hook of mkdocs: the reference pages, made from the table of verbs, the declared settings and the files in conf/."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from clipscale import __version__
from clipscale.cli.help import COUNTS, typed_default
from clipscale.cli.verbs import VERBS
from clipscale.config.presets import default_choices, group_options, preset_title
from clipscale.config.setting import Setting, sections_of, settings_of, summary
from clipscale.config.train_config import TrainConfig

LIMITS = {"least": "at least", "above": "more than", "below": "less than", "most": "at most"}
SHARED = settings_of(TrainConfig)
"""Settings that have their row on the page of `train`."""
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def on_config(config: Any) -> None:
    """The version stands at the foot of every page; a link at its top leads to the repository that pyproject names."""
    config.copyright = f"clipscale {__version__}, {config.copyright}"
    config.repo_url = tomllib.loads(PROJECT.read_text())["project"].get("urls", {}).get("Repository")


def on_files(files: Files, config: Any) -> Files:
    """Add the three pages to those in docs/."""
    for name, page in (("verbs", verbs()), ("settings", settings()), ("presets", presets())):
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    return files


def verbs() -> str:
    """What each verb does, its examples, and the settings that `train` does not have."""
    parts = [
        "# Verbs",
        "What `clipscale train` has too is in [Settings](settings.md). `clipscale VERB --help` shows all.",
    ]
    for name, verb in VERBS.items():
        own = [setting for setting in settings_of(verb.settings).values() if setting.name not in SHARED]
        usage = " ".join(word for word in ("clipscale", name, verb.plain_words, "[KEY=VALUE ...]") if word)
        parts += [f"## {name}", f"{sentence(summary(verb.settings))} `{usage}`"]
        parts += [f"```sh\n{verb.examples}\n```", *([" ".join(verb.notes.split())] if verb.notes else [])]
        parts += [table(own)] if own else []
    return "\n\n".join(parts) + "\n"


def settings() -> str:
    """All settings of `train`, section by section."""
    sections = {
        "": "Keys without a section.",
        **{name: summary(of) for name, of in sections_of(VERBS["train"].settings).items()},
    }
    links = ", ".join(f"[{section or 'the run'}](#{section or 'the-run'})" for section in sections)
    parts = ["# Settings", f"`clipscale train KEY=VALUE ...`. {COUNTS} Empty defaults are null, or nothing."]
    parts += [f"Sections: {links}."]
    for section, help in sections.items():
        rows = [setting for setting in SHARED.values() if setting.name.rpartition(".")[0].split(".")[0] == section]
        parts += [f"## {section or 'The run'}", help, table(rows)]
    return "\n\n".join(parts) + "\n"


def presets() -> str:
    """The files in conf/, group by group."""
    parts = ["# Presets", "`GROUP=NAME` sets several values at once. The defaults of `clipscale train` are in bold."]
    chosen = default_choices("train")
    for group, names in group_options().items():
        bold = {name: "**" if chosen.get(group) == name else "" for name in names}
        rows = [f"| {bold[name]}`{name}`{bold[name]} | {cell(preset_title(group, name))} |" for name in names]
        parts += [f"## {group}", "\n".join(["| preset | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def table(declared: Iterable[Setting]) -> str:
    """A row for each setting: key, default, what it does and accepts."""
    rows = ["| key | default | |", "|---|---|---|"]
    for setting in declared:
        bounds = ", ".join(f"{LIMITS[name]} {bound:g}" for name, bound in setting.bounds.items())
        default = f"`{typed_default(setting.default)}`".replace("``", "")
        meaning = f"{setting.meaning} ({bounds})" if bounds else setting.meaning
        rows.append(f"| `{setting.name}` | {default} | {cell(meaning)} |")
    return "\n".join(rows)


def cell(text: str) -> str:
    """A text inside a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."
