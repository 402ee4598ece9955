"""Explains why samples of a shard are not usable, and names the setting that helps."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import islice

from clipscale.data.addresses import basename
from clipscale.data.sample import (
    IMAGE_TYPES,
    KEY_RULE,
    MAX_TEXT_BYTES,
    BrokenSampleError,
    dotted_names_message,
    dotted_pictures,
    json_fields,
    visible_text,
)
from clipscale.data.shards.reader import Archive
from clipscale.data.shards.requests import SourceError
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import DAMAGE, open_archive

# `why_unusable` looks at this many samples, and at this many members of each.
MAX_LOOKED_AT = 1000
# `why_unusable` names this many kinds of samples, and this many members of each.
MAX_KINDS = 3
# `json_remedy` names this many fields, if their names can be typed.
MAX_FIELDS = 5
_FIELD = re.compile(r"[\w.-]{1,40}")
RULE = (
    f"a sample is a picture (KEY.{', .'.join(IMAGE_TYPES)}) and what data.captions names (KEY.txt), one after "
    f"the other in the tar; {KEY_RULE}"
)


def why_unusable(
    url: str, captions: Sequence[str], store: Store | None = None, *, most: int | None = MAX_LOOKED_AT
) -> str:
    """Why a shard has no usable sample: what its first samples hold. Empty if one has both a picture and one of the
    `captions`, or if the shard cannot be read. `most`: looks at this many samples; None: at all."""
    sources = {source.partition(":")[0] for source in captions}
    member_sets = Counter[str]()
    with suppress(SourceError, *DAMAGE), closing((store or Store()).open(url)[0]) as source:
        for _, members in islice(Archive(*open_archive(source)).samples(), most):
            names = {member.extension for member in islice(members, MAX_LOOKED_AT)}
            if names & sources and names.intersection(IMAGE_TYPES):
                return ""
            member_sets[" and ".join(f".{name}" for name in sorted(names)[:MAX_KINDS])] += 1
    held = ", or ".join(names for names, _ in member_sets.most_common(MAX_KINDS))
    if not held:
        return ""
    remedy = ""
    if ".json" in held:
        remedy = json_remedy(url, captions, store)
    return f"samples of {basename(url)} hold {held}, and data.captions is [{','.join(captions)}]; {remedy or RULE}"


def lost_pairs(url: str, captions: Sequence[str]) -> str:
    """Which of a shard's first samples has pictures with further dots in their names, which are not read. Empty if none
    has.

    Beside a picture that is read, they count only with a caption of such a name: masks and the like have none.
    """
    sources = {source.partition(":")[0] for source in captions}
    with suppress(SourceError, *DAMAGE), closing(Store().open(url)[0]) as source:
        for key, members in islice(Archive(*open_archive(source)).samples(), MAX_LOOKED_AT):
            names = [member.extension for member in islice(members, MAX_LOOKED_AT)]
            stems = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in sources}
            cut = dotted_pictures(names)
            if cut and (any(name.rpartition(".")[0] in stems for name in cut) or not {*names} & {*IMAGE_TYPES}):
                dotted = [name for name in names if "." in name]
                return f"pairs of {basename(url)} are not read: {key} {dotted_names_message(dotted)}"
    return ""


def json_remedy(url: str, captions: Sequence[str], store: Store | None = None, *, also: Sequence[str] = ()) -> str:
    """The setting that takes captions from the JSON of samples that have none of `captions`, and the fields with texts
    in the first such JSON. Empty if there is none. `also`: captions that the setting is to keep."""
    with suppress(SourceError, *DAMAGE), closing((store or Store()).open(url)[0]) as source:
        archive = Archive(*open_archive(source))
        for _, members in islice(archive.samples(), MAX_LOOKED_AT):
            fields: dict[str, object] = {}
            names = set()
            for member in islice(members, MAX_LOOKED_AT):
                names.add(member.extension)
                if member.extension == "json" and member.size <= MAX_TEXT_BYTES and not member.link_error:
                    with suppress(BrokenSampleError):
                        fields = json_fields(archive.read(member))
            has_caption = names & {*captions} or {f"json:{field}" for field in fields} & {*captions}
            texts = [field for field, value in fields.items() if _has_text(value) and _FIELD.fullmatch(field)]
            if texts and not has_caption and names.intersection(IMAGE_TYPES):
                setting = ",".join([*also, "json:KEY"])
                return (
                    f"'data.captions=[{setting}]' takes captions from the JSON; "
                    f"its text keys are {', '.join(texts[:MAX_FIELDS])}"
                )
    return ""


def _has_text(value: object) -> bool:
    """Whether a field of a JSON holds a text, or a list with one."""
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and visible_text(text) for text in texts)
