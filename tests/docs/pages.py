"""The pages of the documentation, and their blocks of code: one that cannot be run says in its title what it needs."""

import re
from typing import NamedTuple

from clipscale.cli.verbs import VERBS
from clipscale.config.presets import PACKAGE

ROOT = PACKAGE.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
# Of help's examples, which have no titles, those that need a GPU, the network or a browser.
LARGE = re.compile(r"torchrun|laion|(train|eval|embed) .*(vit|weights=)|explore|average=")
LARGE_TITLE = ' title="needs GPUs and the network"'
PAGES["--help"] = "".join(
    f"```{'text' if 'fish' in line else 'sh'}{LARGE_TITLE if LARGE.search(line) else ''}\n{line}\n```\n"
    for verb in VERBS.values()
    for line in verb.examples.splitlines()
)
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    page: str
    language: str
    needs: str
    code: str


BLOCKS = [Block(page, *found) for page, text in PAGES.items() for found in FENCE.findall(text)]
# A table of commands that are run as blocks are.
TABLE = "docs/features.md"
IN_TABLE = re.compile(r"`((?:\w+=\S+ )?(?:clipscale|python|launch/\w+\.sh) [^`]*)`")
BLOCKS += [Block(TABLE, "sh", "", f"{line}\n") for line in IN_TABLE.findall(FENCE.sub("", PAGES[TABLE]))]
