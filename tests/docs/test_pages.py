"""The documentation as text: code between the words, formulas, and names that belong together."""

import re
import runpy
from types import SimpleNamespace

import pytest

from clipscale.run_folder.paths import run_folder
from tests.docs.pages import FENCE, PAGES, ROOT

# Code between the words, and in it a word KEY=VALUE with what zsh takes for a pattern, or both shells for alternatives.
CODE = re.compile(r"`([^`]+)`")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
PATTERN = re.compile(r"(?<![\w.])[a-z_]+(?:\.\w+)*=\S*?(?:\[\S*?\]|[*?]|\{\S*?,)")


def test_words_of_commands_between_the_words_can_be_typed_in_zsh() -> None:
    for page, text in PAGES.items():
        for code in CODE.findall(FENCE.sub("", text)):
            assert not PATTERN.search(QUOTED.sub("", code)), f"{page}: `{code}` needs quotes"


def test_formulas_are_typeset_and_text_that_the_parser_eats_fails() -> None:
    """It calls the hook of `make docs` on what Markdown has made of a page."""
    pytest.importorskip("latex2mathml")
    from markdown import markdown
    from mkdocs.exceptions import PluginError

    hook = runpy.run_path(str(ROOT / "docs/formulas.py"))["on_page_content"]
    page = SimpleNamespace(file=SimpleNamespace(src_path="loss.md"))

    def built(text: str) -> str:
        return hook(
            markdown(
                text, extensions=["pymdownx.arithmatex"], extension_configs={"pymdownx.arithmatex": {"generic": True}}
            ),
            page=page,
        )

    html = built("The scores $x_{ij} < 1$:\n\n$$\nL = \\sum_i r_i\n$$\n\n`<u_i, v_j>` and *a* < b")
    assert html.count("<math") == 2 and "<msub><mi>x</mi>" in html and "arithmatex" not in html
    assert 'display="block"' in html and "&lt;u_i, v_j&gt;" in html
    with pytest.raises(PluginError, match=r"loss\.md: the HTML parser takes <u_i, for a tag"):
        built("the scores <u_i, v_j> are")


def test_a_loop_of_slurm_jobs_is_reported_by_the_name_on_the_page() -> None:
    page = (ROOT / "docs/howto/slurm.md").read_text(encoding="utf-8")
    (run,) = re.findall(r" run=(\S+)/\$lr ", page)
    (sweep,) = re.findall(r"clipscale report (\w+)`", page)
    assert run_folder(f"{run}/1e-3").parent == run_folder(sweep)
