"""Zero-shot classification sets, and how a model is measured on them.

N: images, n: images of a batch, C: classes, U: distinct class names, D: feature width.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clipscale.common.record import Metrics, Record
from clipscale.eval import zero_shot
from clipscale.eval.encode import MISSED, Encoder, join
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

    def facts(self) -> Record:
        digest = hashlib.blake2b("\n".join(self.classnames).encode(), digest_size=16).hexdigest()
        return {"prompts": list(self.templates), "classes": len(self.classnames), "classnames": digest}

    def measure(self, encoder: Encoder) -> Metrics:
        """Accuracies, and the mean recall of the classes that have images."""
        target_N = torch.tensor(self.answers, device=encoder.world.device)
        classes_UD, rows_C = encoder.classes(self.classnames, self.templates, self.label)
        ranks = []
        for span, features_nD, usable_n in self.pictures(encoder):
            scores_nC = (features_nD @ classes_UD.T)[:, rows_C]
            ranks_n = zero_shot.target_ranks(scores_nC, target_N[span.start : span.stop])
            ranks.append(ranks_n.masked_fill(~usable_n, MISSED))
        ranks_N = join(ranks, len(self), encoder.batch, encoder.world)
        usable_N = ranks_N != MISSED
        return zero_shot.accuracy_metrics(ranks_N[usable_N], target_N[usable_N]) | {"images": int(usable_N.sum())}
