"""Finds a model's weights in a file by their names, whatever wrappers and trainers put around and before them.

A naming is a way to call a model's weights: open_clip's, its older one, transformers', or that of a tower alone. Of a
name in a file, the segments that no name of a naming has are a wrapper's (`module`, `_orig_mod`, `student`), and so is
what precedes one of its names. Imports nothing heavy.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from clipscale.common.errors import UserError
from clipscale.models.hugging_face import TABLES

VISUAL, TEXT = "visual.", "text."
TOWERS = {VISUAL: "image", TEXT: "text"}
# transformers' beginnings of the same.
THEIRS = {VISUAL: "vision_model.", TEXT: "text_model."}
# Below these in a tower are the modules of another library.
INNER = ("trunk.", "transformer.")
SHARED = ("logit_scale", "logit_bias")
# Where trainers put the weights in a checkpoint. Of several sets of weights these come first.
USUAL = ("state_dict", "model_state_dict", "model")
# Levels of dictionaries in a checkpoint.
DEPTH = 4
# Names in a message.
SHOWN = 3


# -- where weights are in a checkpoint ---------------------------------------------------------------------------------


@runtime_checkable
class Shaped(Protocol):
    """A tensor, or what stands for one whose values are not read."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Held:
    """One set of weights in a file: tensors by name."""

    tensors: dict[str, Shaped]
    # Where it is in the checkpoint, as `state_dict`; empty: at the top.
    key: str = ""
    # Where other sets are.
    others: tuple[str, ...] = ()


def held(content: Mapping[str, object], key: str, setting: str) -> Held:
    """The set of weights at `key` of a checkpoint, or below the prefix `key` of names; without a key the usual one.

    Raises UserError for a key that there is not.
    """
    sets = dict(_sets(content))
    chosen = {path: tensors for path, tensors in sets.items() if not key or f"{path}.".startswith(f"{key}.")}
    large = [path for path, tensors in chosen.items() if 2 * len(tensors) >= max(map(len, chosen.values()))]
    if large:
        taken = next((path for path in ("", *USUAL) if path in large), large[0])
        return Held(chosen[taken], taken, tuple(path for path in large if path != taken))
    if not key:
        return Held({})
    usual = held(content, "", setting).tensors
    below = {name.removeprefix(f"{key}."): x for name, x in usual.items() if name.startswith(f"{key}.")}
    if not below:
        there = [*filter(None, sets), *sorted({name.partition(".")[0] for name in usual})]
        raise UserError(f"{setting} holds nothing at {key!r}, but {listed(there)}")
    return Held(below, key)


def _sets(content: Mapping[str, object]) -> Iterator[tuple[str, dict[str, Shaped]]]:
    """All dictionaries of tensors by name in a checkpoint, by their keys, each once."""
    level = {"": content}
    seen = {id(content)}
    for _ in range(DEPTH):
        inner: dict[str, Mapping[str, object]] = {}
        for path, node in level.items():
            tensors = {name: x for name, x in node.items() if isinstance(name, str) and isinstance(x, Shaped)}
            if tensors:
                yield path, tensors
            for name, value in node.items():
                if isinstance(value, dict) and isinstance(name, str) and id(value) not in seen:
                    seen.add(id(value))
                    inner[f"{path}.{name}" if path else name] = value
        level = inner


# -- which names are a model's -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Naming:
    """How the weights of a model, or of one tower, may be called."""

    # Names with # for every number, and what precedes each in the whole model.
    before: dict[str, str]
    # Of a tower alone: what precedes any other name.
    alone: str = ""


@dataclass(frozen=True)
class Match:
    """A file's names beside those of a model."""

    # The whole model's name by the file's: of what is the model's, and of what else is in its towers.
    names: dict[str, str]
    # The file's names of what is the model's.
    own: frozenset[str] = frozenset()
    # What precedes the model's names, or stands between their segments, as `module.`; the most frequent first.
    wrappers: tuple[str, ...] = ()
    # The file's names of what is in no tower.
    beside: tuple[str, ...] = ()

    def towers(self) -> set[str]:
        """The towers that have weights here, as `visual.`."""
        every = self.names.values()
        return {tower for tower, theirs in THEIRS.items() if any(name.startswith((tower, theirs)) for name in every)}


def known_names() -> Iterator[str]:
    """open_clip's names of the weights of CLIP and SigLIP."""
    for table in TABLES.values():
        for ours, *_ in table["names"]:
            yield from _expanded(ours)
    yield from SHARED


def _expanded(names: str) -> Iterator[str]:
    for name in names.split():
        yield from (name.replace("*", kind) for kind in (("weight", "bias") if "*" in name else ("",)))


def namings(ours: Iterable[str], part: str = "") -> list[Naming]:
    """The namings of a model whose names are `ours`; part: also those of one of its towers alone."""
    names = {generic(name) for name in ours}
    theirs = [[name for _, others, *_ in table["names"] for name in _expanded(others)] for table in TABLES.values()]
    older = {name.removeprefix(TEXT): TEXT * name.startswith(TEXT) for name in names}
    known = [Naming(dict.fromkeys(names, "")), Naming(older)]
    known += [Naming(dict.fromkeys((*whole, *SHARED), "")) for whole in theirs]
    if part:
        known += [_alone(whole, [THEIRS[part]]) for whole in theirs]
        known.append(_alone(names, [f"{part}{inner}" for inner in INNER] + [part]))
    return known


def _alone(names: Iterable[str], prefixes: Sequence[str]) -> Naming:
    """The naming of a tower alone: without one of the prefixes; the last is the tower's."""
    before = {name.removeprefix(prefix): prefix for prefix in prefixes for name in names if name.startswith(prefix)}
    return Naming(before, prefixes[-1])


def generic(name: str) -> str:
    """A name with # for every number."""
    return ".".join("#" if segment.isdigit() else segment for segment in name.split("."))


def matched(names: Collection[str], candidates: Sequence[Naming], setting: str) -> Match:
    """A model's names among those of a file, by the first of the namings that find the most.

    Of each tower they are those behind one prefix. Raises UserError where two prefixes would do.
    """
    every = [(naming, _taken(names, naming)) for naming in candidates]
    naming, taken = max(every, key=lambda pair: len(pair[1].names))
    if not taken.names or len(taken.names) * 4 < min(len(names), len(naming.before)):
        return Match({name: name for name in names})
    if taken.rivals:
        keys = " or ".join(f"FILE::{lead.rstrip('.')}" for lead in taken.rivals)
        raise UserError(f"{setting} has two sets of weights, below {' and '.join(taken.rivals)}; give {keys}")
    wrapped = {name: _wrapper(name, own) for own, name in taken.names.items()}
    leads = {lead for lead, _ in wrapped.values()}
    between = {segment for _, segments in wrapped.values() for segment in segments}
    towers = {name.partition(".")[0]: prefix for name, prefix in naming.before.items()}
    whole: dict[str, str] = {}
    for name in names:
        lead = max((lead for lead in leads if name.startswith(lead)), key=len, default=None)
        rest = [segment for segment in name[len(lead or "") :].split(".") if segment not in between]
        if lead is not None and (naming.alone or rest[0] in towers):
            whole[name] = towers.get(rest[0], naming.alone) + ".".join(rest)
    whole |= {name: naming.before[generic(own)] + own for own, name in taken.names.items()}
    counts = Counter(lead + "".join(f"{segment}." for segment in segments) for lead, segments in wrapped.values())
    del counts[""]
    beside = tuple(sorted({*names} - whole.keys()))
    return Match(whole, frozenset(wrapped), tuple(wrapper for wrapper, _ in counts.most_common()), beside)


@dataclass(frozen=True)
class _Taken:
    """What one naming finds: the file's name by the naming's, and prefixes between which it cannot choose."""

    names: dict[str, str]
    rivals: tuple[str, ...] = ()


def _taken(names: Iterable[str], naming: Naming) -> _Taken:
    """A naming's names in a file: of each tower those behind its most frequent prefix, of equal ones the shortest."""
    found = _own_names(names, naming)
    leads: dict[str, Counter[str]] = {}
    for name, own in found.items():
        leads.setdefault(_tower(own, naming), Counter())[_wrapper(name, own)[0]] += 1
    taken: dict[str, str] = {}
    rivals: tuple[str, ...] = ()
    best = {}
    for tower, counts in leads.items():
        ranks = sorted((-count, lead.count("."), lead) for lead, count in counts.items())
        best[tower] = ranks[0][2]
        if len(ranks) > 1 and ranks[0][:2] == ranks[1][:2]:
            rivals = rivals or (ranks[0][2], ranks[1][2])
    for name, own in sorted(found.items(), key=lambda pair: pair[0].count(".")):  # fewer segments of others
        if _wrapper(name, own)[0] == best[_tower(own, naming)]:
            taken.setdefault(own, name)
    return _Taken(taken, rivals)


def _tower(own: str, naming: Naming) -> str:
    return (naming.before[generic(own)] + own).partition(".")[0]


def _own_names(names: Iterable[str], naming: Naming) -> dict[str, str]:
    """Of a file's names those that end as one of the naming, leaving out segments that the naming does not have."""
    words = {segment for name in naming.before for segment in name.split(".")}
    own = {}
    for name in names:
        *segments, last = name.split(".")
        kept = [segment for segment in segments if segment in words or segment.isdigit()] + [last]
        ends = (".".join(kept[start:]) for start in range(len(kept)))
        end = next((end for end in ends if generic(end) in naming.before), None)
        if end:
            own[name] = end
    return own


def _wrapper(name: str, own: str) -> tuple[str, list[str]]:
    """What precedes the model's own name in a file's, and the segments between its own."""
    rest = own.split(".")
    segments = name.split(".")
    between: list[str] = []
    while rest:
        segment = segments.pop()
        if segment == rest[-1]:
            rest.pop()
        else:
            between.insert(0, segment)
    return "".join(f"{segment}." for segment in segments), between


def tower_alone(names: Collection[str], setting: str) -> str:
    """The tower, as `visual.`, that a file has alone; empty: both, or unknown names. Raises UserError as `matched`."""
    known = [*known_names()]
    other, best = sorted((matched(names, namings(known, part), setting) for part in TOWERS), key=lambda x: len(x.own))
    return best.towers().pop() if best.own and len(best.towers()) == 1 and other.own <= best.own else ""


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
