"""Robustness to shifts of the data: the mean top-1 of ImageNet's variants beside ImageNet's own (Taori et al. 2020)."""

import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from clipscale.report.table import Results, TextTable

IMAGENET = "imagenet(1k|2012)?(val|validation|test)?|ilsvrc2012(imgval|val)?"
SHIFTED = "(imagenetv2|objectnet).*|imageneta|imagenetr|(imagenet)?sketch"
"""Names of sets, in lower case and without signs."""


def robustness(results: Results) -> dict[str, dict[str, float]]:
    """For each kind of result (`""`, `(ema)`, `(limit 1000)`, ...) that has ImageNet's top-1 and that of a variant:

    `imagenet`: its top-1; `shifted`: the mean top-1 of the variants; `gap`: the difference; `relative`: the quotient; `sets`: variants.
    ImageNet-v2 is one variant: matched-frequency if it is there, or else the mean of its other folders.
    """
    own: dict[str, float] = {}
    others: dict[str, dict[str, dict[str, float]]] = {}
    for label, metrics in results.items():
        name, _, marks = label.partition(" ")
        plain = re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("wds_").removesuffix("_test"))
        if "top1" in metrics and re.fullmatch(IMAGENET, plain):
            own[marks] = metrics["top1"]
        elif "top1" in metrics and (match := re.fullmatch(SHIFTED, plain)):
            others.setdefault(marks, {}).setdefault(match[1] or plain, {})[plain] = metrics["top1"]
    found = {}
    for marks in own.keys() & others.keys():
        mean = fmean(_variant(folders) for folders in others[marks].values())
        relative = mean / own[marks] if own[marks] else 0.0
        found[marks] = {"imagenet": own[marks], "shifted": mean, "gap": own[marks] - mean, "relative": relative}
        found[marks]["sets"] = len(others[marks])
    return dict(sorted(found.items()))


def _variant(folders: Mapping[str, float]) -> float:
    """The top-1 of a variant from those of its folders: of `imagenetv2` and `imagenetv2matchedfrequency`, or of all."""
    main = [top1 for name, top1 in folders.items() if name == "imagenetv2" or "matchedfrequency" in name]
    return fmean(main or folders.values())


def robustness_tables(results: Results) -> list[TextTable]:
    """The figures as a table, in per cent; none without ImageNet and one of its variants."""
    return _tables(robustness(results))


def newest_robustness(evaluations: Iterable[Mapping[str, Any]]) -> list[TextTable]:
    """The same of a run's evaluations (`step`, `results`), oldest first: for each kind, the newest that has ImageNet and a variant."""
    newest: dict[str, tuple[int, dict[str, float]]] = {}
    for evaluation in evaluations:
        newest |= {marks: (evaluation["step"], one) for marks, one in robustness(evaluation["results"]).items()}
    return _tables({f"{marks} (step {step})": one for marks, (step, one) in sorted(newest.items())})


def _tables(found: Mapping[str, Mapping[str, float]]) -> list[TextTable]:
    rows = []
    for marks, one in found.items():
        shares = [f"{100 * one[key]:.1f}" for key in ("imagenet", "shifted", "gap", "relative")]
        rows.append([" ".join(["robustness", *marks.split()]), *shares, f"{one['sets']:.0f}"])
    means = ("ImageNet top-1 %", "mean of its variants %", "gap", "variants / ImageNet %", "variants")
    heads = ("shifts of ImageNet", *means)
    return [TextTable(heads, [rows])] if rows else []
