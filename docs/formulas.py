"""A hook of mkdocs: LaTeX becomes MathML, which browsers typeset without a script. A page that loses text to the HTML
parser fails."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
"""As pymdownx.arithmatex leaves them."""
TAGS = re.compile(
    "a|abbr|article|b|blockquote|br|button|code|dd|del|details|div|dl|dt|em|figure|figcaption|h[1-6]|hr|i|img|input|kbd"
    "|label|li|nav|ol|p|pre|s|section|small|span|strong|su[bp]|summary|svg|table|tbody|t[dhr]|thead|ul|u"
)
"""What pages are made of, before their formulas."""


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Raises PluginError for text that a browser would take for a tag, such as <u_i, v_j>."""
    lost = [tag for tag in re.findall(r"</?([a-zA-Z][^\s/>]*)", html) if not TAGS.fullmatch(tag)]
    if lost:
        raise PluginError(f"{page.file.src_path}: the HTML parser takes <{lost[0]} for a tag; write it as code or &lt;")
    return FORMULA.sub(typeset, html)


def typeset(formula: re.Match[str]) -> str:
    """The MathML of a formula, in a box that scrolls if it is one of its own."""
    block = formula[1] == "div"
    mathml = convert(unescape(formula[2]).strip(), display="block" if block else "inline")
    return f'<div class="formula">{mathml}</div>' if block else mathml
