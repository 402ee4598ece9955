"""Parts of long captions: `data.captions=[txt@sentence]`.

Long generated captions begin with a summary. A model that trains on later sentences learns the details too
(DeBias-CLIP, CVPR 2026).
"""

import re
from bisect import bisect
from collections.abc import Callable
from itertools import pairwise

from clipscale.data.order import CounterRNG

# The end of a sentence, with the quotes and brackets that close behind it.
END = re.compile("[.!?][\"')\\]\u2019\u201d\u00bb]*(?=\\s)|[\u3002\uff01\uff1f][\u300d\u300f\uff09\u2019\u201d]*|\n")


def sentences(text: str) -> list[str]:
    """A text's sentences, without white space around them. A sentence ends at each of these:

    - the end of a line,
    - one of `. ! ?` before white space,
    - the full-width form of one of these.

    Quotes and brackets that close there belong to the sentence. Abbreviations are not recognised.
    """
    ends = [0, *(match.end() for match in END.finditer(text)), len(text)]
    parts = [text[start:end].strip() for start, end in pairwise(ends)]
    return [part for part in parts if part]


def draw_part(text: str, part: str, rng: CounterRNG, fits: Callable[[str], bool]) -> str:
    """A part of a caption, drawn with the sample's random numbers.

    `part` is one of these:

    - `sentence`: a random sentence.
    - `span`: a random sentence and as many of the next ones as fit the context.
    - `later`: as `span`, but without the caption's first sentence if there are others.

    `fits`: whether a text fits the context. A single sentence is used even if it does not.
    """
    choices = sentences(text)
    if part == "later" and len(choices) > 1:
        choices = choices[1:]
    if not choices:
        return text
    start = rng.integer(len(choices))
    if part == "sentence":
        return choices[start]
    stops = range(len(choices) + 1)
    # bisection: each test tokenises a text
    too_long = bisect(stops, False, lo=start + 2, key=lambda stop: not fits(" ".join(choices[start:stop])))
    return " ".join(choices[start : too_long - 1])
