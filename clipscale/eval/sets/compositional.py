"""Compositional sets as they are published, and their scores.

SugarCrepe (Hsieh et al. 2023), Winoground (Thrush et al. 2022), WinoGAViL (Bitton et al. 2022).
N: images, M: captions, D: feature width, q: questions, i: images of a question (1 or 2), c: its captions (2).
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.eval.sets import prompts
from clipscale.eval.sets.captions import images_beside
from clipscale.eval.sets.item import COMPOSITION, EvalSet, Question

SUGAR_CREPE = ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj")
_EXAMPLES, _CUES = "examples.jsonl", "winogavil_dataset.csv"
MANY = 10
"""WinoGAViL's questions have 5 or 6 images, or 10 to 12; DataComp reports the latter."""


def found(root: Path) -> bool:
    """Whether `root` holds files of one of them."""
    return any((root / name).is_file() for name in (_EXAMPLES, _CUES, *(f"{part}.json" for part in SUGAR_CREPE)))


def load(root: Path) -> EvalSet:
    """Loads the set from `root`. Raises UserError."""
    if (root / _EXAMPLES).is_file():
        return _winoground(root)
    return _winogavil(root) if (root / _CUES).is_file() else _sugar_crepe(root)


def scores(questions: Sequence[Question], images_ND: Tensor, captions_MD: Tensor, usable_N: Tensor) -> dict[str, float]:
    """Of questions of one form, the shares that are answered rightly; WinoGAViL's are `associations`.

    A question with a broken image is answered wrongly.
    """
    if questions[0].right:
        return associations(questions, images_ND.cpu(), captions_MD.cpu(), usable_N.cpu())
    images_qi = torch.tensor([question.images for question in questions], device=images_ND.device)
    captions_qc = torch.tensor([question.captions for question in questions], device=images_ND.device)
    return matches(images_ND[images_qi] @ captions_MD[captions_qc].transpose(1, 2), usable_N[images_qi].all(1))


def matches(similarities_qic: Tensor, usable_q: Tensor) -> dict[str, float]:
    """Shares of the questions that are answered rightly; ties, NaNs and broken images count against the model.

    One image: `accuracy`, its first caption is nearer to it than the second. Two: `text_score`, each image is nearer to its own caption
    than to the other's; `image_score`, each caption is nearer to its own image; `group_score`, both (Winoground, section 3).
    """
    s = similarities_qic
    if s.shape[1] == 1:
        right = {"accuracy": s[:, 0, 0] > s[:, 0, 1]}
    else:
        text = (s[:, 0, 0] > s[:, 0, 1]) & (s[:, 1, 1] > s[:, 1, 0])
        image = (s[:, 0, 0] > s[:, 1, 0]) & (s[:, 1, 1] > s[:, 0, 1])
        right = {"text_score": text, "image_score": image, "group_score": text & image}
    return {name: float((hits & usable_q).double().mean()) for name, hits in right.items()}


def associations(
    questions: Sequence[Question], images_ND: Tensor, captions_MD: Tensor, usable_N: Tensor
) -> dict[str, float]:
    """`jaccard`: the mean Jaccard index of the right images and as many of the nearest; `jaccard_5_6`, `jaccard_10_12`: by size.

    Ties, NaNs and broken images count against the model.
    """
    found: dict[str, list[float]] = {"jaccard": [], "jaccard_5_6": [], "jaccard_10_12": []}
    for images, captions, right in questions:
        index = torch.tensor(images)
        scores = (images_ND[index] @ captions_MD[captions[0]]).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        # Of equal scores the wrong images, which come last in `images`, are taken first.
        nearest = (len(images) - 1 - scores.flip(0).argsort(descending=True, stable=True))[:right]
        hits = int(((nearest < right) & scores[nearest].isfinite()).sum()) if bool(usable_N[index].all()) else 0
        for name in ("jaccard", "jaccard_10_12" if len(images) >= MANY else "jaccard_5_6"):
            found[name].append(hits / (2 * right - hits))
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _sugar_crepe(root: Path) -> EvalSet:
    """Seven files, each an object of entries: `filename` of COCO's val2017, `caption`, `negative_caption`."""
    absent = [part for part in SUGAR_CREPE if not (root / f"{part}.json").is_file()]
    if absent:
        raise UserError(
            f"eval.sets: {root} lacks {', '.join(f'{part}.json' for part in absent)} of SugarCrepe; fetch them from "
            "https://github.com/RAIVNLab/sugar-crepe (data)"
        )
    place: dict[str, int] = {}
    captions: list[str] = []
    questions: list[Question] = []
    parts: list[str] = []
    for part in SUGAR_CREPE:
        file = root / f"{part}.json"
        try:
            entries = files.parse_json(prompts.text_of(file, root)).values()
            for entry in entries:
                image = place.setdefault(str(entry["filename"]), len(place))
                questions.append(Question((image,), (len(captions), len(captions) + 1)))
                captions += prompts.stripped([str(entry["caption"]), str(entry["negative_caption"])])
                parts.append(part)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"eval.sets: {file} is not SugarCrepe's ({error!r}); fetch it again") from error
    return _item(root, root / f"{SUGAR_CREPE[0]}.json", list(place), captions, questions, parts)


def _winoground(root: Path) -> EvalSet:
    """A line of examples.jsonl is a question: `image_0` and `image_1` (PNGs in a folder beside it), `caption_0` and `caption_1`."""
    file = root / _EXAMPLES
    names: list[str] = []
    captions: list[str] = []
    try:
        for line in prompts.lines_of(file):
            entry = files.parse_json(line)
            names += [str(Path(entry[key]).with_suffix(".png")) for key in ("image_0", "image_1")]
            captions += prompts.stripped([str(entry[key]) for key in ("caption_0", "caption_1")])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"eval.sets: {file} is not Winoground's ({error!r}); fetch it again") from error
    pairs = [(n, n + 1) for n in range(0, len(names), 2)]
    return _item(root, file, names, captions, [Question(pair, pair) for pair in pairs], [])


def _winogavil(root: Path) -> EvalSet:
    """A row of the table is a cue, the names of its candidates, and those that were associated with it; images beside the table."""
    file = root / _CUES
    place: dict[str, int] = {}
    captions: list[str] = []
    questions: list[Question] = []
    try:
        for row in csv.DictReader(prompts.text_of(file, root).splitlines(keepends=True)):
            candidates, right = (files.parse_json(row[key]) for key in ("candidates", "associations"))
            order = sorted(candidates, key=lambda name: name not in right)  # the right ones first
            images = tuple(place.setdefault(f"{name}.jpg", len(place)) for name in order)
            questions.append(Question(images, (len(captions),), sum(name in right for name in candidates)))
            cue = row["cue"].strip().lower()
            captions.append(f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}")  # as DataComp
            if not questions[-1].right:
                raise ValueError(f"the cue {cue!r} has no association")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, csv.Error) as error:
        raise UserError(f"eval.sets: {file} is not WinoGAViL's ({error!r}); fetch it again") from error
    return _item(root, file, list(place), captions, questions, [])


def _item(
    root: Path, file: Path, names: list[str], captions: list[str], questions: list[Question], parts: list[str]
) -> EvalSet:
    if not questions:
        raise UserError(f"eval.sets: {root} holds no question; fetch the set again")
    if len(captions) != sum(len(question.captions) for question in questions):
        raise UserError(f"eval.sets: {root} has empty captions; fetch the set again")
    images = images_beside(file, names)
    return EvalSet(root.name, root, COMPOSITION, images, captions=captions, questions=questions, part_of=parts)
