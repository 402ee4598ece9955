"""Tokens are open_clip's, without the import of its package."""

import subprocess
import sys

import numpy as np
import pytest
from open_clip.tokenizer import SimpleTokenizer

from clipscale.models.tokenizer import ClipTokenizer

TEXTS = [
    "",
    " \n ",
    "A photo of the DOG's ball; it's 3.14 m, they'll don't",
    "&amp;lt;b&amp;gt; schÃ¶n â€œquotedâ€ naïve x_y_z state-of-the-art",
    "aaaaaaa ababababab ooooo mississippi",
    "<start_of_text> a <END_OF_TEXT> <end_of_text>",
    "日本語 한국어 🎉🇩🇪 İstanbul \u017f \u212a ﬁ Ⅷ ² ½ x̧",
    "a long" + "word" * 40,
    "word " * 40,
]


@pytest.mark.parametrize("clean", ["lower", "whitespace", "canonicalize"])
@pytest.mark.parametrize("length", [77, 16, 1])
def test_tokens_are_open_clips(clean: str, length: int) -> None:
    expected = SimpleTokenizer(clean=clean)(TEXTS, length)
    assert np.array_equal(ClipTokenizer(clean)(TEXTS, length), expected)


def test_what_workers_import_needs_no_open_clip() -> None:
    code = "import sys; from importlib import import_module; from clipscale.data.loader.fork_server import PRELOADED\n"
    code += "for name in PRELOADED: import_module(name)\n"
    code += "print('open_clip' in sys.modules, 'torch._dynamo' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
