"""Zero-shot classification sets, which measure a model's accuracy.

N: images, n: images of a batch, C: classes, U: distinct class names, D: feature width, S: sizes of features.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clipscale.eval import zero_shot
from clipscale.eval.encode import MISSED, EvalEncoder, gather_batches
from clipscale.eval.sets.item import EvalSet, Measurement


@dataclass(frozen=True, kw_only=True)
class ClassificationSet(EvalSet):
    kind = "classification"
    default_main_metrics = ("top1",)

    answers: Sequence[int]
    classnames: Sequence[str]
    # The prompts, with {c} for the class name.
    templates: Sequence[str] = ()

    def class_of(self, index: int) -> int:
        return self.answers[index]

    def facts(self) -> dict[str, object]:
        names = "\n".join(self.classnames).encode("utf-8", "surrogatepass")  # folders may have any names
        digest = hashlib.blake2b(names, digest_size=16).hexdigest()
        return {"prompts": list(self.templates), "classes": len(self.classnames), "classnames": digest}

    def measure(self, encoder: EvalEncoder) -> Measurement:
        """Accuracies, and the mean recall of the classes that have images."""
        target_N = torch.tensor(self.answers, device=encoder.world.device)
        classes_UD, rows_C = encoder.encode_classes(self.classnames, self.templates, self.label)
        classes = encoder.at_sizes(classes_UD)
        ranks = []
        broken: Counter[str] = Counter()
        for span, features_nD, usable_n in self.encode_pictures(encoder, broken):
            scores = [
                (rows @ embeddings.T)[:, rows_C] for rows, embeddings in zip(encoder.at_sizes(features_nD), classes)
            ]
            target_n = target_N[span.start : span.stop]
            ranks_nS = torch.stack([zero_shot.target_ranks(scores_nC, target_n) for scores_nC in scores], dim=1)
            ranks.append(ranks_nS.masked_fill(~usable_n[:, None], MISSED))
        ranks_NS = gather_batches(ranks, len(self), encoder.batch_size, encoder.world)
        usable_N = ranks_NS[:, 0] != MISSED
        right_N = target_N[usable_N]
        counts = {"images": len(right_N)}
        metrics = [zero_shot.accuracy_metrics(ranks_N, right_N) | counts for ranks_N in ranks_NS[usable_N].T]
        return Measurement(metrics, broken)
