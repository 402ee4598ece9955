"""Robustness to shifts of the data: the mean top-1 of ImageNet's variants beside ImageNet's own (Taori et al. 2020)."""

import re
from collections.abc import Mapping

from clipscale.report.table import Results, TextTable

IMAGENET = "imagenet(1k|2012)?(val|validation|test)?|ilsvrc2012(imgval|val)?"
SHIFTED = "imagenetv2.*|objectnet.*|imageneta|imagenetr|(imagenet)?sketch"
"""Names of sets, in lower case and without signs."""


def robustness(results: Results) -> dict[str, dict[str, float]]:
    """For each kind of result (`""`, `(ema)`, `(limit 1000)`, ...) that has ImageNet's top-1 and that of a variant:

    `imagenet`: its top-1; `shifted`: the mean top-1 of the variants; `gap`: the difference; `kept`: the quotient; `sets`: variants.
    """
    own: dict[str, float] = {}
    others: dict[str, list[float]] = {}
    for label, metrics in results.items():
        name, _, marks = label.partition(" ")
        plain = re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("wds_").removesuffix("_test"))
        if "top1" in metrics and re.fullmatch(IMAGENET, plain):
            own[marks] = metrics["top1"]
        elif "top1" in metrics and re.fullmatch(SHIFTED, plain):
            others.setdefault(marks, []).append(metrics["top1"])
    found = {}
    for marks in own.keys() & others.keys():
        mean = sum(others[marks]) / len(others[marks])
        kept = mean / own[marks] if own[marks] else 0.0
        found[marks] = {"imagenet": own[marks], "shifted": mean, "gap": own[marks] - mean, "kept": kept}
        found[marks]["sets"] = len(others[marks])
    return dict(sorted(found.items()))


def robustness_tables(results: Mapping[str, Mapping[str, float]]) -> list[TextTable]:
    """The figures as a table, in per cent; none without ImageNet and one of its variants."""
    rows = [
        [
            f"robustness {marks}".strip(),
            *(f"{100 * one[key]:.1f}" for key in ("imagenet", "shifted", "gap", "kept")),
            f"{one['sets']:.0f}",
        ]
        for marks, one in robustness(results).items()
    ]
    heads = ("shifts of ImageNet", "ImageNet top-1 %", "mean of its variants %", "gap", "kept %", "variants")
    return [TextTable(heads, [rows])] if rows else []
