"""What the samples of a shard hold, for the line that says why none of them can be used."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import islice

from clipscale.data.decode import IMAGE_TYPES
from clipscale.data.shards.addresses import SourceError, leaf_of
from clipscale.data.shards.archive import Archive
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import DAMAGE, unpacked

MOST = 1000
"""Samples, and members of a sample, that are looked at."""
KINDS = 3
"""Kinds of samples, and members of a sample, that are named."""
RULE = (
    f"a sample is a picture (KEY.{', .'.join(IMAGE_TYPES)}) and what data.captions names (KEY.txt), one after "
    "the other in the tar; KEY ends at the first dot of the name"
)


def unusable(url: str, captions: Sequence[str], store: Store | None = None) -> str:
    """Why no sample has a picture and a caption of these sources, by the names of the shard's first members; empty if
    one has both, or none can be read."""
    sources = {source.partition(":")[0] for source in captions}
    kinds = Counter[str]()
    with suppress(SourceError, *DAMAGE), closing((store or Store()).open(url)[0]) as source:
        for _, members in islice(Archive(*unpacked(source)).samples(), MOST):
            names = {member.extension for member in islice(members, MOST)}
            if names & sources and names.intersection(IMAGE_TYPES):
                return ""
            kinds[" and ".join(f".{name}" for name in sorted(names)[:KINDS])] += 1
    held = ", or ".join(kind for kind, _ in kinds.most_common(KINDS))
    return held and f"samples of {leaf_of(url)} hold {held}, and data.captions is [{','.join(captions)}]; {RULE}"
