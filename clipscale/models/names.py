"""Finds a model's weights in a file by their names, whatever wrappers and trainers put around and before them.

A naming is a way to call a model's weights: open_clip's, its older one, transformers', or that of a tower alone. A name
in a file is a naming's name, the bare name, in wrappers (`module`, `_orig_mod`, `student`): segments before it, and
segments inside it that the naming does not have. Imports nothing heavy.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from clipscale.common.errors import UserError
from clipscale.models.hugging_face import TABLES

VISUAL, TEXT = "visual.", "text."
TOWERS = {VISUAL: "image", TEXT: "text"}
# How the same names begin in transformers.
TRANSFORMERS_PREFIXES = {VISUAL: "vision_model.", TEXT: "text_model."}
# Below these in a tower are the modules of another library.
INNER_PREFIXES = ("trunk.", "transformer.")
SHARED = ("logit_scale", "logit_bias")
# Where trainers put the weights in a checkpoint. Of several sets of weights these come first.
USUAL_KEYS = ("state_dict", "model_state_dict", "model")
# Levels of dictionaries in a checkpoint.
MAX_DEPTH = 4
# Most names in a message.
MAX_LISTED = 3


# -- where weights are in a checkpoint ---------------------------------------------------------------------------------


@runtime_checkable
class Shaped(Protocol):
    """A tensor, or what stands for one whose values are not read."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class WeightSet:
    """One set of weights in a file: tensors by name."""

    tensors: dict[str, Shaped]
    # Where it is in the checkpoint, as `state_dict`; empty: at the top.
    key: str = ""
    # The keys of the checkpoint's other sets.
    others: tuple[str, ...] = ()


def weight_set(content: Mapping[str, object], key: str, setting: str) -> WeightSet:
    """The set of weights at `key` of a checkpoint, or below the prefix `key` of names; without a key the usual one.

    Raises UserError for a key that there is not.
    """
    sets = dict(_sets(content))
    chosen = {path: tensors for path, tensors in sets.items() if not key or f"{path}.".startswith(f"{key}.")}
    large = [path for path, tensors in chosen.items() if 2 * len(tensors) >= max(map(len, chosen.values()))]
    if large:
        usual_key = next((path for path in ("", *USUAL_KEYS) if path in large), large[0])
        return WeightSet(chosen[usual_key], usual_key, tuple(path for path in large if path != usual_key))
    if not key:
        return WeightSet({})
    usual = weight_set(content, "", setting).tensors
    below = {name.removeprefix(f"{key}."): x for name, x in usual.items() if name.startswith(f"{key}.")}
    if not below:
        there = [*filter(None, sets), *sorted({name.partition(".")[0] for name in usual})]
        raise UserError(f"{setting} holds nothing at {key!r}, but {listed(there)}")
    return WeightSet(below, key)


def _sets(content: Mapping[str, object]) -> Iterator[tuple[str, dict[str, Shaped]]]:
    """All dictionaries of tensors by name in a checkpoint, by their keys, each once."""
    level = {"": content}
    seen = {id(content)}
    for _ in range(MAX_DEPTH):
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

    # Name with # for every number -> what precedes it in the whole model's names.
    before: dict[str, str]
    # For a naming of a tower alone: what precedes all names that `before` lacks.
    alone: str = ""


@dataclass(frozen=True)
class Match:
    """A file's names beside those of a model."""

    # Name in the file -> name in the whole model: of the model's weights, and of what else is in its towers.
    names: dict[str, str]
    # The file's names of the model's weights.
    of_model: frozenset[str] = frozenset()
    # What precedes the model's names, or stands between their segments, as `module.`; the most frequent first.
    wrappers: tuple[str, ...] = ()
    # The file's names that are in no tower.
    beside: tuple[str, ...] = ()

    def towers(self) -> set[str]:
        """The towers that have weights here, as `visual.`."""
        every = self.names.values()
        return {
            tower
            for tower, theirs in TRANSFORMERS_PREFIXES.items()
            if any(name.startswith((tower, theirs)) for name in every)
        }


def known_names() -> Iterator[str]:
    """open_clip's names of the weights of CLIP and SigLIP."""
    for table in TABLES.values():
        for ours, *_ in table["names"]:
            yield from _expanded(ours)
    yield from SHARED


def _expanded(names: str) -> Iterator[str]:
    for name in names.split():
        yield from (name.replace("*", suffix) for suffix in (("weight", "bias") if "*" in name else ("",)))


def namings(ours: Iterable[str], tower: str = "") -> list[Naming]:
    """The namings of a model whose names are `ours`. `tower`: also the namings of this tower alone."""
    names = {generic(name) for name in ours}
    theirs = [[name for _, others, *_ in table["names"] for name in _expanded(others)] for table in TABLES.values()]
    older = {name.removeprefix(TEXT): TEXT * name.startswith(TEXT) for name in names}
    candidates = [Naming(dict.fromkeys(names, "")), Naming(older)]
    candidates += [Naming(dict.fromkeys((*table_names, *SHARED), "")) for table_names in theirs]
    if tower:
        candidates += [_alone(table_names, [TRANSFORMERS_PREFIXES[tower]]) for table_names in theirs]
        candidates.append(_alone(names, [f"{tower}{inner}" for inner in INNER_PREFIXES] + [tower]))
    return candidates


def _alone(names: Iterable[str], prefixes: Sequence[str]) -> Naming:
    """The naming of a tower alone: its names without one of the prefixes, of which the last is the tower's own."""
    before = {name.removeprefix(prefix): prefix for prefix in prefixes for name in names if name.startswith(prefix)}
    return Naming(before, prefixes[-1])


def generic(name: str) -> str:
    """A name with # for every number."""
    return ".".join("#" if segment.isdigit() else segment for segment in name.split("."))


def match_names(names: Collection[str], candidates: Sequence[Naming], setting: str) -> Match:
    """A model's names in a file, by the naming that finds the most, of several the first.

    A tower's names are behind one prefix. Raises UserError where two prefixes would do.
    """
    every = [(naming, _matched_by(names, naming)) for naming in candidates]
    naming, outcome = max(every, key=lambda pair: len(pair[1].names))
    if not outcome.names or len(outcome.names) * 4 < min(len(names), len(naming.before)):
        return Match({name: name for name in names})
    if outcome.rivals:
        keys = " or ".join(f"FILE::{lead.rstrip('.')}" for lead in outcome.rivals)
        raise UserError(f"{setting} has two sets of weights, below {' and '.join(outcome.rivals)}; give {keys}")
    wrappers = {name: _wrapper(name, bare) for bare, name in outcome.names.items()}
    model_names = _names_in_towers(names, naming, wrappers.values())
    model_names |= {name: naming.before[generic(bare)] + bare for bare, name in outcome.names.items()}
    counts = Counter(lead + "".join(f"{segment}." for segment in between) for lead, between in wrappers.values())
    del counts[""]
    return Match(
        names=model_names,
        of_model=frozenset(outcome.names.values()),
        wrappers=tuple(wrapper for wrapper, _ in counts.most_common()),
        beside=tuple(sorted({*names} - model_names.keys())),
    )


def _names_in_towers(
    names: Iterable[str], naming: Naming, wrappers: Collection[tuple[str, list[str]]]
) -> dict[str, str]:
    """Name in the file -> name in the whole model, for all that is in a tower once the wrappers are taken off.

    That includes names that the naming lacks, as of a classifier.
    """
    leads = {lead for lead, _ in wrappers}
    inserted = {segment for _, between in wrappers for segment in between}
    towers = {name.partition(".")[0]: prefix for name, prefix in naming.before.items()}
    model_names = {}
    for name in names:
        lead = max((lead for lead in leads if name.startswith(lead)), key=len, default=None)
        if lead is None:
            continue
        rest = [segment for segment in name.removeprefix(lead).split(".") if segment not in inserted]
        if naming.alone or rest[0] in towers:
            model_names[name] = towers.get(rest[0], naming.alone) + ".".join(rest)
    return model_names


@dataclass(frozen=True)
class _Outcome:
    """What one naming finds in a file."""

    # Bare name -> the name in the file.
    names: dict[str, str]
    # Prefixes between which nothing decides.
    rivals: tuple[str, ...] = ()


def _matched_by(names: Iterable[str], naming: Naming) -> _Outcome:
    """A naming's names in a file: of each tower those behind its most frequent prefix, or the shortest of several."""
    bare_of = _bare_names(names, naming)
    leads: dict[str, Counter[str]] = {}
    for name, bare in bare_of.items():
        leads.setdefault(_tower(bare, naming), Counter())[_wrapper(name, bare)[0]] += 1
    file_names: dict[str, str] = {}
    rivals: tuple[str, ...] = ()
    best = {}
    for tower, counts in leads.items():
        ranks = sorted((-count, lead.count("."), lead) for lead, count in counts.items())
        best[tower] = ranks[0][2]
        if len(ranks) > 1 and ranks[0][:2] == ranks[1][:2]:
            rivals = rivals or (ranks[0][2], ranks[1][2])
    for name, bare in sorted(bare_of.items(), key=lambda pair: pair[0].count(".")):  # fewer segments of others
        if _wrapper(name, bare)[0] == best[_tower(bare, naming)]:
            file_names.setdefault(bare, name)
    return _Outcome(file_names, rivals)


def _tower(bare: str, naming: Naming) -> str:
    return (naming.before[generic(bare)] + bare).partition(".")[0]


def _bare_names(names: Iterable[str], naming: Naming) -> dict[str, str]:
    """Name in a file -> its bare name. Names that end as none of the naming's are left out."""
    words = {segment for name in naming.before for segment in name.split(".")}
    bare_of = {}
    for name in names:
        *segments, leaf = name.split(".")
        kept = [segment for segment in segments if segment in words or segment.isdigit()] + [leaf]
        ends = (".".join(kept[start:]) for start in range(len(kept)))
        end = next((end for end in ends if generic(end) in naming.before), None)
        if end:
            bare_of[name] = end
    return bare_of


def _wrapper(name: str, bare: str) -> tuple[str, list[str]]:
    """What precedes the bare name in a name of a file, and the segments inside it that are a wrapper's."""
    rest = bare.split(".")
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
    """The tower, as `visual.`, that a file has alone; empty: both, or unknown names.

    Raises UserError as `match_names` does.
    """
    clip = [*known_names()]
    matches = [match_names(names, namings(clip, tower), setting) for tower in TOWERS]
    other, best = sorted(matches, key=lambda match: len(match.of_model))
    is_alone = best.of_model and len(best.towers()) == 1 and other.of_model <= best.of_model
    return best.towers().pop() if is_alone else ""


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and the number of the others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
