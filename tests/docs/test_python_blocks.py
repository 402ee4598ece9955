"""Every block of Python in the documentation works as it stands."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import clipscale
from clipscale.config.setting import setting
from tests.docs.pages import BLOCKS
from tests.loss.cases import assert_exact, oracle
from tests.loss.workers import local_results, positives_first, stacked, whole
from tests.support.ranks import workers


def test_python_blocks_work() -> None:
    import torch

    for code in (b.code for b in BLOCKS if b.language == "python" and not b.needs):
        images, texts = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        queries = torch.randn(8, 4)
        passages = torch.randn(16, 4)
        encoder = torch.nn.Linear(4, 4)
        names = {
            "clipscale": clipscale, "setting": setting, "logit_scale": torch.tensor(10.0),
            "image_features": images.requires_grad_(), "text_features": texts, "queries": queries, "passages": passages,
            "query_tokens": {"input": queries}, "passage_tokens": {"input": passages}, "query_encoder": encoder,
            "passage_encoder": encoder, "optimizer": torch.optim.SGD(encoder.parameters(), lr=0.0),
            "loss_of_representations": lambda q, p: clipscale.contrastive_loss(q, p, 1.0),
            "columns": [{"input": queries}, {"input": passages[:8]}, {"input": passages[8:]}],
            "model": lambda features, encoder=encoder: {"sentence_embedding": encoder(**features)},
        }  # fmt: skip
        exec(code, names)


def test_the_pages_objective_is_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from clipscale.loss import api, reference

    [code] = [b.code for b in BLOCKS if "class Hinge(" in b.code]
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setitem(reference.OBJECTIVES, "hinge", names["Hinge"]())
    monkeypatch.setitem(api.CHOICES, "objective", ("hinge",))
    u, v = torch.nn.functional.normalize(torch.randn(2, 9, 5, dtype=torch.float64), dim=-1).requires_grad_()
    values = [
        loss(u, v, 3.0, objective="hinge") for loss in (clipscale.contrastive_loss, reference.dense_contrastive_loss)
    ]
    torch.testing.assert_close(*values)
    for _ in range(2):  # a second backward pass through the same graph is possible, too
        torch.testing.assert_close(*[torch.autograd.grad(value, [u, v], retain_graph=True) for value in values])


def results_by_broadcast(group: Any, rank: int, *args: Any, code: str) -> list[Any]:
    """This rank's `local_results` with the exchange of the page."""
    from torch import distributed as dist

    from clipscale.loss import terms
    from clipscale.loss.communicator import Communicator

    def broadcast(self: Communicator, x: Any, owner: int) -> Any:
        received = x.clone()
        dist.broadcast(received, group=self.group, group_src=owner)
        return received

    names: dict[str, Any] = {}
    exec(code, names)
    Communicator.broadcast = broadcast  # type: ignore[attr-defined]
    terms.make_exchange = lambda name, inputs, comm, runtime: names["Broadcast"](comm)
    return local_results(group, rank, *args)


def test_the_pages_exchange_is_exact() -> None:
    [code] = [b.code for b in BLOCKS if "class Broadcast(" in b.code]
    images, texts = stacked(3, 4, 6, 5)  # with two hard negatives on each rank
    with workers(3) as started:
        for objective in ("softmax", "sigmoid"):
            answers = started.run(
                partial(results_by_broadcast, code=code), 3, images, texts, 9.0, None, {"objective": objective}
            )
            actual = whole(answers)
            actual[1] = actual[1].flatten(0, 1)
            actual[2] = positives_first(actual[2], 4)
            expected = oracle(images.flatten(0, 1), positives_first(texts, 4), 9.0, objective=objective)
            assert_exact(actual, expected, 9.0, 1e-10, objective)


@pytest.mark.slow  # it imports transformers and its Trainer
def test_python_blocks_with_a_trainer_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    monkeypatch.chdir(tmp_path)
    blocks = [block.code for block in BLOCKS if (block.language, block.needs) == ("python", "needs accelerate")]
    assert blocks
    for code in blocks:
        exec(code, {})
