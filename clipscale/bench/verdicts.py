"""The bars that the benchmarks are held to, as lines: reached, missed, or not measured, with the figures that say so."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from clipscale.bench.loss_methods import FORESEEN
from clipscale.bench.step_ways import Name
from clipscale.units import format_count

Row = dict[str, Any]
Found = tuple[str, float | str]
"""What a figure is of, and the figure; or why there is none."""
Value = Callable[[Row], float | None]

GIB = 2**30
OURS = "infcl"
"""The loss of a user who does not choose."""
MFU = {"vit-l14": 0.45, "vit-b16": 0.35}
"""Least share of the device's peak that the plain step uses, by preset of the model."""
TENTH = 0.1
"""What predicted memory may be off by, in parts of the measured."""
FLAT = 2**15, 2**20
"""Batches between which memory is to be flat."""
WRONG = ("failed", "out of memory")


def verdict(bar: str, found: Iterable[Found], holds: Callable[[float], bool], spoken: str = "{:.2f}") -> str:
    """One line. What failed or ran out of memory misses the bar; what has no figure for another reason is named and does not count."""
    found = list(found)
    values = [value for _, value in found if not isinstance(value, str)]
    wrong = [value for _, value in found if value in WRONG]
    said = ", ".join(f"{name} {value if isinstance(value, str) else spoken.format(value)}" for name, value in found)
    if not values and not wrong:
        return f"not measured: {bar}: {said or 'there are no such rows'}"
    return f"{'reached' if not wrong and all(map(holds, values)) else 'missed'}: {bar}: {said}"


def figure(row: Row, value: Value) -> float | str:
    if row["status"] != "ok":
        return str(row["status"])
    found = value(row)
    return "has no such figure" if found is None else found


# ---- the loss ----


def of_loss(rows: Sequence[Row]) -> list[str]:
    """Of one rank. On CUDA: share of the GEMM rate, speed beside inf-cl, memory at 1M; on a CPU: speed and memory beside ClipLoss."""
    rows = [row for row in rows if row["ranks"] == 1]
    ours = [row for row in rows if row["method"] == OURS]
    devices, lines = {row["device"] for row in rows}, []
    if "cuda" in devices:
        large = [row for row in ours if row["n"] >= 2**16 and row["d"] == 768 and row["dtype"] == "bf16"]
        huge = [row for row in ours if row["n"] >= 2**20]
        where = "N >= 64k, D = 768, bf16"
        fractions = [(_case(row), figure(row, lambda row: row["gemm_fraction"])) for row in large]
        sizes = [(_case(row), figure(row, lambda row: row["extra_bytes"] / GIB)) for row in huge]
        speeds = _quotients(large, rows, "inf_cl", _seconds)
        lines += [
            verdict(f"at least 75 % of the GEMM rate at 4 units ({where})", fractions, lambda x: x >= 0.75, "{:.1%}"),
            verdict(f"at least 8 times as fast as inf-cl ({where})", speeds, lambda x: x >= 8),
            verdict("at most 2 GiB of extra memory (N >= 1M)", sizes, lambda x: x <= 2, "{:.2f} GiB"),
        ]
    if "cpu" in devices:
        large = [row for row in ours if row["n"] >= 2**14 and row["d"] == 512]
        where = "N >= 16k, D = 512, on a CPU"
        speeds = _quotients(large, rows, "open_clip", _seconds)
        shares = _quotients(large, rows, "open_clip", lambda row: row["extra_bytes"])
        lines += [
            verdict(f"at least 1.5 times as fast as ClipLoss ({where})", speeds, lambda x: x >= 1.5),
            verdict(f"at most a twentieth of ClipLoss's extra memory ({where})", shares, lambda x: x >= 20, "1/{:.0f}"),
        ]
    return lines


def of_choices(rows: Sequence[Row]) -> list[str]:
    """What each choice of the kernels made otherwise gains beside `triton` as it is, and what was foreseen of it."""
    plain = {_case(row): row for row in rows if row["method"] == "triton" and row["status"] == "ok"}
    lines = []
    for row in rows:
        if row["method"].startswith("triton-") and row["status"] == "ok" and _case(row) in plain:
            longer = _seconds(row) / _seconds(plain[_case(row)]) - 1
            said = f"{abs(longer):.1%} {'slower' if longer > 0 else 'faster'} than triton as it is"
            foreseen = FORESEEN.get(row["method"])
            lines.append(f"{row['method']} at {_case(row)}: {said}" + (f" (foreseen: {foreseen})" if foreseen else ""))
    return lines


def _case(row: Row) -> str:
    return f"{format_count(row['n'])} x {row['d']} {row['dtype']}"


def _seconds(row: Row) -> float:
    return float(row["total_s"]["median"])


def _quotients(ours: Sequence[Row], rows: Sequence[Row], peer: str, value: Callable[[Row], float]) -> list[Found]:
    """The peer's figure over ours, case by case."""
    found: list[Found] = []
    for row in ours:
        same = next((r for r in rows if r["method"] == peer and _case(r) == _case(row)), {"status": "not run"})
        if row["status"] != "ok":
            found.append((_case(row), row["status"]))
        elif same["status"] != "ok":
            found.append((_case(row), f"({peer}: {same['status']})"))
        else:
            found.append((_case(row), value(same) / value(row) if value(row) else math.inf))
    return found


# ---- the step ----


def of_step(rows: Sequence[Row], model: str, device: str) -> list[str]:
    """Utilisation where the model has a bar, the cache's time beside plain's, ours beside open_clip's, and whether memory is flat."""
    lines = []
    if model in MFU and device == "cuda":
        shares = [(row["case"], figure(row, lambda row: row.get("mfu"))) for row in rows if row["method"] == "plain"]
        lines.append(verdict(f"plain at {MFU[model]:.0%} MFU at least", shares, lambda x: x >= MFU[model], "{:.1%}"))
    cached = [row for row in rows if Name.of(row["method"]).base == "cache"]
    ratios: dict[bool, list[Found]] = {True: [], False: []}
    for row in cached:
        frozen = Name.of(row["method"]).variant == "frozen"
        ratios[frozen].append((row["case"], figure(row, lambda row: row["ratio"] and row["ratio"]["median"])))
    return [
        *lines,
        verdict("the cache in at most 1.25 times plain's time", ratios[False], lambda x: x <= 1.25),
        verdict("with a frozen image tower, in at most 1.05 times plain's", ratios[True], lambda x: x <= 1.05),
        verdict("faster than open_clip in every row", _beside_open_clip(rows), lambda x: x > 1),
        verdict(
            f"memory flat within 2 % from {' to '.join(map(format_count, FLAT))} pairs, the loss's linear part aside",
            _flatness(cached),
            lambda x: x <= 0.02,
            "{:.1%}",
        ),
    ]


def _beside_open_clip(rows: Sequence[Row]) -> list[Found]:
    """Our samples a second over open_clip's: of what holds the whole batch its plain loop's, else its accumulation's, at the same batch,
    or at its largest. A frozen tower is not compared: it does less."""
    found: list[Found] = []
    for row in rows:
        name = Name.of(row["method"])
        peer = "open_clip-plain" if name.whole else "open_clip"
        if name.variant == "frozen" or name.base.startswith("open_clip"):
            continue
        theirs = [other for other in rows if other["method"] == peer and other["status"] == "ok"]
        if row["status"] != "ok":
            found.append((row["case"], row["status"]))
        elif not theirs:
            found.append((row["case"], f"({peer}: no figure)"))
        else:
            other = max(theirs, key=lambda other: (other["batch"] == row["batch"], other["batch"]))
            found.append((f"{row['case']} to {other['case']}", row["samples_per_s"] / other["samples_per_s"]))
    return found


Growth = tuple[str, Row, Row, dict[str, list[int]]]
"""A method, its rows at the least and the largest batch, and the bytes of each pass batch by batch."""


def growths(rows: Sequence[Row]) -> list[Growth]:
    """Of every method measured on a device at several batches; encoding less the features, which are the loss's."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method and "mem_encode_bytes" in row.get("parts", {})]
        own.sort(key=lambda row: row["batch"])
        if len({row["batch"] for row in own}) > 1:
            parts = [row["parts"] for row in own]
            encode = [part["mem_encode_bytes"] - part["features_bytes"] for part in parts]
            passes = {"encode, less features,": encode, "replay": [part["mem_replay_bytes"] for part in parts]}
            found.append((method, own[0], own[-1], passes))
    return found


def _flatness(rows: Sequence[Row]) -> list[Found]:
    found: list[Found] = [(row["case"], row["status"]) for row in rows if row["status"] in WRONG]
    for method, least, most, passes in growths(rows):
        if least["batch"] <= FLAT[0] and most["batch"] >= FLAT[1]:
            found += [(f"{method}: {name}", max(sizes) / min(sizes) - 1) for name, sizes in passes.items()]
        else:
            span = " to ".join(format_count(row["batch"]) for row in (least, most))
            found.append((method, f"was measured from {span} only"))
    return found


# ---- the plan ----


def of_plan(rows: Sequence[Row]) -> list[str]:
    """Of runs beside their predictions: the phase of each that is furthest off. The host's memory, which others share, is left out."""
    found: list[Found] = []
    for row in rows:
        if row["status"] != "ok":
            found.append((row["run"], row["status"]))
            continue
        compared = row["predicted"]["compared"]
        errors = {
            name: abs(c["ratio"] - 1) for name, c in compared.items() if name != "host" and c["ratio"] is not None
        }
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            found.append((f"{row['run']} ({worst})", errors[worst]))
        else:
            found.append((row["run"], "has no measured phases"))
    bar = f"memory predicted within {TENTH:.0%} of measured in every phase"
    return [verdict(bar, found, lambda x: x <= TENTH, "{:.1%}")]
