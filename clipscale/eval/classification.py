"""Zero-shot classification sets, and how a model is measured on them.

n: images of a batch, C: classes, U: distinct class names, D: feature width.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clipscale.eval import zero_shot
from clipscale.eval.encode import Encoder
from clipscale.eval.sets.item import EvalSet


@dataclass(frozen=True, kw_only=True)
class ClassificationSet(EvalSet):
    kind = "classification"
    main = ("top1",)

    answers: Sequence[int]
    classnames: Sequence[str]
    templates: Sequence[str] = ()
    """The prompts, with {c} for the class name."""

    def class_of(self, index: int) -> int:
        return self.answers[index]

    def facts(self) -> dict[str, Any]:
        digest = hashlib.blake2b("\n".join(self.classnames).encode(), digest_size=16).hexdigest()
        return {"prompts": list(self.templates), "classes": len(self.classnames), "classnames": digest}

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Accuracies, and the mean recall of the classes."""
        device = encoder.world.device
        C = len(self.classnames)
        classes_UD, rows_C = encoder.classes(self.classnames, self.templates, self.label)
        counts_3C = torch.zeros(3, C, dtype=torch.int64, device=device)
        broken = torch.zeros((), dtype=torch.int64, device=device)
        for span, features_nD, usable_n in encoder.images(self):
            targets = torch.tensor(self.answers[span.start : span.stop], device=device, dtype=torch.int64)
            scores_nC = (features_nD @ classes_UD.T)[:, rows_C]
            ranks = zero_shot.target_ranks(scores_nC, targets).masked_fill(~usable_n, C + 5)
            counts_3C += zero_shot.accuracy_counts(ranks, targets, C)
            broken += (~usable_n).sum()
        counts_3C, broken = (encoder.world.gather_rows(counts[None]).sum(0) for counts in (counts_3C, broken))
        return zero_shot.accuracy_metrics(counts_3C) | {"images": len(self), "broken": int(broken)}
