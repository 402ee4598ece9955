"""Finds a model's weights in a file by their keys, also where wrappers and trainers have added to the keys.

A key style is a naming scheme of a model's weights: open_clip's, OpenAI's (open_clip's without `text.`), transformers',
or one of these for a tower alone. A key in a file may have a prefix (`module.`, `student.`) and inserted segments
(`_orig_mod`). Without them it is the canonical key of a style. `models/weights/__init__.py` has an example. Imports
nothing heavy.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from clipscale.common.errors import UserError
from clipscale.models.weights.hugging_face import MODEL_TYPES

VISUAL = "visual."
TEXT = "text."
TOWERS = {VISUAL: "image", TEXT: "text"}
# Tower -> the beginning of its keys in transformers.
TRANSFORMERS_PREFIXES = {VISUAL: "vision_model.", TEXT: "text_model."}
# Below these in a tower are the modules of another library.
INNER_PREFIXES = ("trunk.", "transformer.")
SHARED = ("logit_scale", "logit_bias")
# Places where trainers put the weights in a checkpoint. If there are several sets of weights, these come first.
USUAL_KEYS = ("state_dict", "model_state_dict", "model")
# Levels of dictionaries in a checkpoint.
MAX_DEPTH = 4
# Most names in a message.
MAX_LISTED = 3


# ---- where weights are in a checkpoint ----


@runtime_checkable
class Shaped(Protocol):
    """A tensor, or a stand-in for one whose values are not read."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class WeightSet:
    """One set of weights in a file."""

    # Key of a weight -> the weight.
    tensors: dict[str, Shaped]
    # Where the set is in the checkpoint, as `state_dict`; empty: at the top.
    path: str = ""
    # Where the checkpoint's other sets are.
    other_paths: tuple[str, ...] = ()


def choose_weight_set(content: Mapping[str, object], path: str, setting: str) -> WeightSet:
    """The set of weights at `path` of a checkpoint; without a path the usual one.

    A path may also be the beginning of keys of the usual set. Raises UserError where there is neither.
    """
    sets = dict(_tensor_dictionaries(content))
    chosen = {there: tensors for there, tensors in sets.items() if not path or f"{there}.".startswith(f"{path}.")}
    most = max(map(len, chosen.values()), default=0)
    large = [there for there, tensors in chosen.items() if 2 * len(tensors) >= most]
    if large:
        usual_path = next((usual for usual in ("", *USUAL_KEYS) if usual in large), large[0])
        others = tuple(there for there in large if there != usual_path)
        return WeightSet(chosen[usual_path], usual_path, others)
    if not path:
        return WeightSet({})
    usual = choose_weight_set(content, "", setting).tensors
    below = {key.removeprefix(f"{path}."): x for key, x in usual.items() if key.startswith(f"{path}.")}
    if not below:
        there = [*filter(None, sets), *sorted({key.partition(".")[0] for key in usual})]
        raise UserError(f"{setting} holds nothing at {path!r}, but {listed(there)}")
    return WeightSet(below, path)


def _tensor_dictionaries(content: Mapping[str, object]) -> Iterator[tuple[str, dict[str, Shaped]]]:
    """All dictionaries of a checkpoint that have tensors, by their paths, each once."""
    level = {"": content}
    seen = {id(content)}
    for _ in range(MAX_DEPTH):
        next_level: dict[str, Mapping[str, object]] = {}
        for path, node in level.items():
            tensors = {key: x for key, x in node.items() if isinstance(key, str) and isinstance(x, Shaped)}
            if tensors:
                yield path, tensors
            for key, value in node.items():
                if isinstance(value, dict) and isinstance(key, str) and id(value) not in seen:
                    seen.add(id(value))
                    next_level[f"{path}.{key}" if path else key] = value
        level = next_level


# ---- key styles ----


@dataclass(frozen=True)
class KeyStyle:
    """A naming scheme for the weights of a model, or of one tower."""

    # Canonical key with digits as '#' -> prefix in the full model: empty, `visual.` or `text.`.
    prefixes: dict[str, str]
    # For a style of one tower alone: the prefix of its keys that `prefixes` lacks.
    tower_prefix: str = ""

    def full_key(self, canonical: str) -> str:
        """The key in the full model."""
        return self.prefixes[key_pattern(canonical)] + canonical

    def tower_of(self, canonical: str) -> str:
        """The first segment of the key in the full model."""
        return self.full_key(canonical).partition(".")[0]


def key_pattern(key: str) -> str:
    """A key with '#' for every number."""
    return ".".join("#" if segment.isdigit() else segment for segment in key.split("."))


def known_names() -> Iterator[str]:
    """open_clip's keys of the weights of CLIP and SigLIP, as patterns."""
    for table in MODEL_TYPES.values():
        for ours, *_ in table["names"]:
            yield from _expanded(ours)
    yield from SHARED


def _expanded(names: str) -> Iterator[str]:
    """The names of an entry of the table; `*` stands for `weight` and `bias`."""
    for name in names.split():
        for kind in ("weight", "bias") if "*" in name else ("",):
            yield name.replace("*", kind)


def key_styles(model_keys: Iterable[str], tower: str = "") -> list[KeyStyle]:
    """The styles in which a file may have a model with these keys. `tower`: also styles of this tower alone."""
    patterns = {key_pattern(key) for key in model_keys}
    openai = {pattern.removeprefix(TEXT): TEXT if pattern.startswith(TEXT) else "" for pattern in patterns}
    transformers = [
        [pattern for _, theirs, *_ in table["names"] for pattern in _expanded(theirs)] for table in MODEL_TYPES.values()
    ]
    styles = [KeyStyle(dict.fromkeys(patterns, "")), KeyStyle(openai)]
    styles += [KeyStyle(dict.fromkeys((*theirs, *SHARED), "")) for theirs in transformers]
    if tower:
        styles += [_style_of_tower(theirs, [TRANSFORMERS_PREFIXES[tower]]) for theirs in transformers]
        styles.append(_style_of_tower(patterns, [*(f"{tower}{inner}" for inner in INNER_PREFIXES), tower]))
    return styles


def _style_of_tower(patterns: Iterable[str], prefixes: Sequence[str]) -> KeyStyle:
    """The style of a tower alone: its keys without one of the prefixes. The last prefix is the tower's own."""
    prefix_of = {
        pattern.removeprefix(prefix): prefix
        for prefix in prefixes
        for pattern in patterns
        if pattern.startswith(prefix)
    }
    return KeyStyle(prefix_of, prefixes[-1])


# ---- the parts of a key in a file ----


class Wrapping(NamedTuple):
    """The parts of a key in a file that its canonical key does not have."""

    # A prefix, such as `module.`.
    prefix: str
    # Inserted segments, such as `_orig_mod`.
    inserted: tuple[str, ...]

    def __str__(self) -> str:
        return self.prefix + "".join(f"{segment}." for segment in self.inserted)


def _wrapping(key: str, canonical: str) -> Wrapping:
    """Compare from the end, since a prefix may repeat a segment of the canonical key."""
    expected = canonical.split(".")
    segments = key.split(".")
    inserted: list[str] = []
    while expected:
        segment = segments.pop()
        if segment == expected[-1]:
            expected.pop()
        else:
            inserted.insert(0, segment)
    return Wrapping("".join(f"{segment}." for segment in segments), tuple(inserted))


def _canonical_keys(keys: Iterable[str], style: KeyStyle) -> dict[str, str]:
    """Key in the file -> canonical key: its longest end that the style has. Keys without one are left out."""
    words = {segment for pattern in style.prefixes for segment in pattern.split(".")}
    canonical = {}
    for key in keys:
        *segments, leaf = key.split(".")
        known = [segment for segment in segments if segment in words or segment.isdigit()]
        known.append(leaf)
        for start in range(len(known)):
            end = ".".join(known[start:])
            if key_pattern(end) in style.prefixes:
                canonical[key] = end
                break
    return canonical


# ---- which keys are a model's ----


@dataclass(frozen=True)
class Match:
    """The keys of a file that are a model's."""

    # Key in the file -> key in the full model: the model's weights, and what else is in its towers.
    model_keys: dict[str, str]
    # The file's keys of the model's weights.
    matched: frozenset[str] = frozenset()
    # The wrappings that were taken off the model's keys, such as `module.`; the most frequent first.
    wrappings: tuple[str, ...] = ()
    # The file's keys that are in no tower.
    unmatched: tuple[str, ...] = ()

    def towers(self) -> set[str]:
        """The towers that have weights here, as `visual.`."""
        every = self.model_keys.values()
        return {
            tower
            for tower, theirs in TRANSFORMERS_PREFIXES.items()
            if any(key.startswith((tower, theirs)) for key in every)
        }


@dataclass(frozen=True)
class _StyleMatch:
    """The keys of a file in one style."""

    # Canonical key -> key in the file.
    file_keys: dict[str, str]
    # Two prefixes of a tower that are equally frequent and equally long.
    tied_prefixes: tuple[str, ...] = ()


def match_names(keys: Collection[str], styles: Sequence[KeyStyle], setting: str) -> Match:
    """A model's keys in a file, by the style that finds the most; in a tie by the first such style.

    A tower's keys have one prefix. Raises UserError where two prefixes would do.
    """
    matches = [(style, _match_style(keys, style)) for style in styles]
    style, match = max(matches, key=lambda pair: len(pair[1].file_keys))
    found = len(match.file_keys)
    if found == 0 or 4 * found < min(len(keys), len(style.prefixes)):
        return Match({key: key for key in keys})
    if match.tied_prefixes:
        places = " or ".join(f"FILE::{prefix.rstrip('.')}" for prefix in match.tied_prefixes)
        raise UserError(f"{setting} has two sets of weights, below {' and '.join(match.tied_prefixes)}; give {places}")
    wrappings = [_wrapping(key, canonical) for canonical, key in match.file_keys.items()]
    model_keys = _keys_in_towers(keys, style, wrappings)
    model_keys |= {key: style.full_key(canonical) for canonical, key in match.file_keys.items()}
    counts = Counter(map(str, wrappings))
    del counts[""]
    return Match(
        model_keys=model_keys,
        matched=frozenset(match.file_keys.values()),
        wrappings=tuple(wrapping for wrapping, _ in counts.most_common()),
        unmatched=tuple(sorted({*keys} - model_keys.keys())),
    )


def _match_style(keys: Iterable[str], style: KeyStyle) -> _StyleMatch:
    """A style's keys in a file. For each tower it takes the most frequent prefix, and the shortest in a tie."""
    canonical = _canonical_keys(keys, style)
    counts_of_tower: dict[str, Counter[str]] = {}
    for key, end in canonical.items():
        counts_of_tower.setdefault(style.tower_of(end), Counter())[_wrapping(key, end).prefix] += 1
    best: dict[str, str] = {}
    tied: tuple[str, ...] = ()
    for tower, counts in counts_of_tower.items():

        def rank(prefix: str, counts: Counter[str] = counts) -> tuple[int, int]:
            """The most frequent first, then the one with the fewest segments."""
            return -counts[prefix], prefix.count(".")

        first, *others = sorted(sorted(counts), key=rank)
        best[tower] = first
        if not tied and others and rank(others[0]) == rank(first):
            tied = (first, others[0])
    file_keys: dict[str, str] = {}
    for key, end in sorted(canonical.items(), key=lambda pair: pair[0].count(".")):  # without insertions first
        if _wrapping(key, end).prefix == best[style.tower_of(end)]:
            file_keys.setdefault(end, key)
    return _StyleMatch(file_keys, tied)


def _keys_in_towers(keys: Iterable[str], style: KeyStyle, wrappings: Collection[Wrapping]) -> dict[str, str]:
    """Key in the file -> key in the full model, for all that is in a tower once the wrappings are taken off.

    That includes keys that the style lacks, such as a classifier's.
    """
    prefixes = sorted({wrapping.prefix for wrapping in wrappings}, key=len, reverse=True)
    inserted = {segment for wrapping in wrappings for segment in wrapping.inserted}
    towers = {pattern.partition(".")[0]: prefix for pattern, prefix in style.prefixes.items()}
    model_keys = {}
    for key in keys:
        prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
        if prefix is None:
            continue
        segments = [segment for segment in key.removeprefix(prefix).split(".") if segment not in inserted]
        if style.tower_prefix or segments[0] in towers:
            model_keys[key] = towers.get(segments[0], style.tower_prefix) + ".".join(segments)
    return model_keys


def tower_alone(keys: Collection[str], setting: str) -> str:
    """The tower, as `visual.`, that a file has alone; empty: both, or unknown keys.

    Raises UserError as `match_names` does.
    """
    clip = [*known_names()]
    matches = [match_names(keys, key_styles(clip, tower), setting) for tower in TOWERS]
    other, best = sorted(matches, key=lambda match: len(match.matched))
    is_alone = best.matched and len(best.towers()) == 1 and other.matched <= best.matched
    return best.towers().pop() if is_alone else ""


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and the number of the others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
