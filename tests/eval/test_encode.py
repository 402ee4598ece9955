"""Batches do not depend on the number of ranks: features and figures of a real model are the same, bit for bit, on 1, 2 and 4."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from clipscale.config.sections import EvalConfig
from clipscale.distributed.world import World
from clipscale.eval.encode import Encoder, join, spans
from clipscale.eval.run import evaluate
from clipscale.eval.sets.load import load_set
from clipscale.models.towers import build_model
from tests.eval.sets import NAMES, classification_set, retrieval_set
from tests.eval.test_compositional import colour, sugar_crepe
from tests.eval.test_multilingual import xtd
from tests.eval.test_verb import TINY
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "batch", "size"), [(1, 4, 3), (7, 4, 1), (7, 2, 3), (8, 2, 4), (9, 2, 4), (5, 9, 2)])
def test_every_input_has_one_place_on_one_rank(count: int, batch: int, size: int) -> None:
    shares = [spans(count, batch, World(rank, size, CPU)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1, "equally many passes on every rank"
    assert sorted(i for share in shares for span in share for i in span) == list(range(count))
    alone = set(spans(count, batch, World(0, 1, CPU)))
    assert {span for share in shares for span in share if span} == alone, "the batches of one process"


def test_a_batch_that_is_not_full_is_joined_without_its_padding() -> None:
    world = World(0, 1, CPU)
    rows = torch.arange(14.0).view(7, 2)
    parts = [rows[span.start : span.stop] for span in spans(7, 3, world)]
    assert torch.equal(join(parts, 7, 3, world), rows)


def features_and_figures(
    rank: int, size: int, run: str, classes: str, captions: str, *others: str
) -> tuple[list[torch.Tensor], dict, int]:  # type: ignore[type-arg]
    torch.manual_seed(0)
    model = build_model(TINY).eval()
    world = World(rank, size, CPU)
    encoder = Encoder(model, world, nullcontext, batch=4, threads=1)
    item = load_set(Path(classes))
    with torch.no_grad():
        images = join([features for _, features, _ in encoder.images(item)], len(item), 4, world)
        found = [images, encoder.classes(item)[0], encoder.texts(load_set(Path(captions)).captions)]
    passes: list[int] = []
    for tower in (model.image, model.text):
        tower.register_forward_pre_hook(lambda *_: passes.append(1))
    config = EvalConfig(sets=[classes, captions, *others], batch=4, workers=1)
    return found, evaluate(model, config, world, run_dir=Path(run), step=1), len(passes)


def test_features_and_figures_are_the_same_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    classes = str(classification_set(tmp_path / "classes", [*NAMES, "red", "green", "red"], wrong=[1, 4]))
    captions = str(retrieval_set(tmp_path / "captions"))
    sets = classes, captions, str(xtd(tmp_path / "xtd10")), str(sugar_crepe(tmp_path / "crepe", colour))
    wanted, figures, _ = features_and_figures(0, 1, str(tmp_path / "1"), *sets)
    for size in (2, 4):
        answers = run_ranks(features_and_figures, size, str(tmp_path / str(size)), *sets)
        assert len({passes for *_, passes in answers}) == 1, "towers that communicate need equally many on every rank"
        for features, results, _ in answers:
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(features, wanted)), f"{size} ranks"
            assert results == figures
        assert json.loads((tmp_path / str(size) / "eval/step_00000001.json").read_text())["results"] == figures
