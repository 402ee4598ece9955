"""Zero-shot classification sets, and how a model is measured on them.

n: images of a batch, C: classes, G: groups, U: distinct class names, D: feature width.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from clipscale.eval import zero_shot
from clipscale.eval.encode import Encoder
from clipscale.eval.sets.item import EvalSet


@dataclass(frozen=True, kw_only=True)
class ClassificationSet(EvalSet):
    kind = "classification"
    main = ("top1",)

    labels: Sequence[int]
    """The class of each image."""
    classnames: Sequence[str]
    templates: Sequence[str] = ()
    """The prompts, with {c} for the class name."""
    groups: Sequence[int] = ()
    """The group of each image, from 0, for the accuracy of the worst group; empty: there are none."""

    def class_of(self, index: int) -> int:
        return self.labels[index]

    def part(self, chosen: Sequence[int]) -> Self:
        groups = [self.groups[i] for i in chosen] if self.groups else ()
        return replace(self, labels=[self.labels[i] for i in chosen], groups=groups)

    def facts(self) -> dict[str, Any]:
        digest = hashlib.blake2b("\n".join(self.classnames).encode(), digest_size=16).hexdigest()
        return {"prompts": list(self.templates), "classes": len(self.classnames), "classnames": digest}

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Accuracies; of a set with groups also the worst group's."""
        device = encoder.world.device
        C = len(self.classnames)
        G = max(self.groups, default=-1) + 1
        classes_UD, rows_C = encoder.classes(self.classnames, self.templates, self.label)
        counts_3C = torch.zeros(3, C, dtype=torch.int64, device=device)
        counts_3G = torch.zeros(3, G, dtype=torch.int64, device=device)
        predicted_C = torch.zeros(C, dtype=torch.int64, device=device)
        broken = torch.zeros((), dtype=torch.int64, device=device)
        for span, features_nD, usable_n in encoder.images(self):
            targets = torch.tensor(self.labels[span.start : span.stop], device=device, dtype=torch.int64)
            scores_nC = (features_nD @ classes_UD.T)[:, rows_C]
            ranks = zero_shot.target_ranks(scores_nC, targets).masked_fill(~usable_n, C + 5)
            counts_3C += zero_shot.accuracy_counts(ranks, targets, C)
            predicted_C += torch.bincount(scores_nC.argmax(1)[usable_n], minlength=C)
            if self.groups:
                groups = torch.tensor(self.groups[span.start : span.stop], device=device, dtype=torch.int64)
                counts_3G += zero_shot.accuracy_counts(ranks, groups, G)
            broken += (~usable_n).sum()
        counts_3C, counts_3G, predicted_C, broken = (
            encoder.world.gather_rows(counts[None]).sum(0) for counts in (counts_3C, counts_3G, predicted_C, broken)
        )
        metrics = zero_shot.accuracy_metrics(counts_3C)
        if "macro_f1" in self.metric:
            metrics["macro_f1"] = zero_shot.macro_f1(counts_3C, predicted_C)
        if self.groups:
            metrics |= zero_shot.worst_groups(counts_3G)
        return metrics | {"images": len(self), "broken": int(broken)}
