"""Linear layers in 8 bits: the second pass repeats the first bit for bit, and the features stay near those of bf16."""

import builtins
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao", reason="precision=fp8 and int8 need torchao, an extra")

from clipscale.cli.compose import once
from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.config.parse import typed
from clipscale.config.sections import ModelConfig, PrecisionConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed.world import World
from clipscale.loss.api import contrastive_loss
from clipscale.models import eight_bit
from clipscale.models.towers import ClipModel, build_model
from clipscale.step.grad_cache import GradCache
from clipscale.step.precision import Precision
from clipscale.train import Run
from tests.conftest import TINY

CPU = torch.device("cpu")
LAYERS = {"fp8": "Float8Linear", "int8": "Int8Linear"}
ARCHITECTURE: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2},
}


def models(kind: str) -> tuple[ClipModel, ClipModel, Precision]:
    """The same weights in bf16 and in 8 bits."""
    torch.manual_seed(0)
    plain = build_model(ModelConfig(name="own", architecture=ARCHITECTURE))
    converted, precision = copy.deepcopy(plain), Precision(PrecisionConfig(name=kind), CPU)
    for tower in (converted.image, converted.text):
        precision.convert(tower)
    return plain, converted, precision


def inputs(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(1, 49000, (n, 24), generator=generator)


@pytest.mark.parametrize("kind", LAYERS)
def test_names_and_values_of_the_parameters_stay(kind: str) -> None:
    plain, converted, _ = models(kind)
    before, after = plain.state_dict(), converted.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    layers = [m for m in converted.modules() if type(m).__name__ == LAYERS[kind]]
    assert len(layers) == 8, "two in each block's MLP"


@pytest.mark.parametrize("kind", LAYERS)
def test_features_are_near_those_of_bf16(kind: str) -> None:
    plain, converted, precision = models(kind)
    for given, name in zip(inputs(6), ("image", "text")):
        with torch.no_grad(), precision.autocast():
            found, wanted = (getattr(m, name)(given).float() for m in (converted, plain))
        worst = float((found - wanted).norm() / wanted.norm())
        assert 1e-4 < worst < 0.05, f"{name}: {worst:.1e}"


@pytest.mark.parametrize("kind", LAYERS)
def test_the_second_pass_repeats_the_first_bit_for_bit(kind: str) -> None:
    """So the features' gradients belong to the features that the loss has seen."""
    _, converted, precision = models(kind)
    seen: list[list[Tensor]] = []

    class Watched(nn.Module):
        def __init__(self, tower: nn.Module) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.tower(x)
            seen[-1].append(y.detach().clone())
            return y

    cache = GradCache(
        [Watched(converted.image), Watched(converted.text)],
        lambda u, v: contrastive_loss(u, v, converted.logit_scale.exp()),
        chunks=[3, 4],
        autocast=precision.autocast,
    )
    seen.append([])
    features = cache.encode(*inputs(10))
    cache.backward(cache.loss(*features))
    seen.append([])
    cache.replay()
    first, second = (sorted(part, key=lambda y: (y.shape, float(y.sum()))) for part in seen)
    assert len(first) == len(second) == 4 + 3
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in converted.image.parameters())


@pytest.mark.parametrize("kind", LAYERS)
def test_a_run_trains_such_layers(shards: str, tmp_path: Path, kind: str) -> None:
    words = (*TINY, f"data.train={shards}", f"run={tmp_path}/run", f"precision={kind}")
    config = typed(TrainConfig, once("train", list(words)))
    run = Run(config, World(0, 1, CPU))
    run.stream.close()
    kinds = [{type(m).__name__ for m in tower.modules()} for tower in (run.state.model.image, run.state.model.text)]
    assert all(LAYERS[kind] in found for found in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_a_run_in_8_bits_follows_the_curve_of_bf16_and_resumes_bit_for_bit(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in TINY if not word.startswith(("precision", "samples"))]

    def curve(run: str, precision: str, samples: int = 64) -> list[float]:
        given = [*words, f"data.train={shards}", f"run={run}", f"precision={precision}", f"samples={samples}"]
        assert main(["train", *given, "schedule=constant"]) == 0
        lines = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    whole, half = curve("whole", kind), curve("halves", kind, 32)
    assert curve("halves", kind) == whole and half == whole[:2]
    assert whole == pytest.approx(curve("bf16", "bf16"), rel=0.02) and len(whole) == 4


@pytest.mark.parametrize(("kind", "older", "least"), [("fp8", (8, 0), 90), ("int8", (7, 5), 80)])
def test_where_it_cannot_be_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, kind: str, older: tuple[int, int], least: int
) -> None:
    with pytest.raises(UserError, match=rf"precision={kind}: a tower has no linear layer of a suitable size"):
        eight_bit.convert(nn.Sequential(nn.Linear(10, 16)), CPU, kind)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: older)
    name = "sm_{}{}".format(*older)
    with pytest.raises(
        UserError, match=rf"precision={kind}: this GPU \({name}\) has no such products, sm_{least} and later have"
    ):
        eight_bit.convert(nn.Linear(16, 16), torch.device("cuda", 0), kind)
    found = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    eight_bit.int8_linear.cache_clear()
    with pytest.raises(UserError, match=rf"precision={kind} needs torchao .*; install clipscale\[fp8\]"):
        eight_bit.convert(nn.Linear(16, 16), CPU, kind)


def test_int8_layers_multiply_as_integers() -> None:
    """Forward, and both products of the backward pass, against rows and columns rounded here; inputs and gradients of any layout."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(5, 3, 32).transpose(0, 1).requires_grad_()
    plain = copy.deepcopy(layer)
    assert eight_bit.convert(layer, CPU, "int8") == 1
    y, wanted = layer(x), plain(x)
    given = torch.randn(3, 48, 5).transpose(1, 2)

    def rounded(a: Tensor) -> Tensor:
        scale = a.abs().amax(1, keepdim=True) / 127
        return (a / scale).round() * scale

    torch.testing.assert_close(y, rounded(x.reshape(-1, 32)).view(3, 5, 32) @ rounded(plain.weight).T + plain.bias)
    assert 1e-4 < (y - wanted).norm() / wanted.norm() < 0.02
    y.backward(given)
    rows, columns = given.reshape(-1, 48), x.detach().reshape(-1, 32)
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad.reshape(-1, 32), rounded(rows) @ rounded(plain.weight.T).T)
    torch.testing.assert_close(layer.weight.grad, rounded(rows.T) @ rounded(columns.T).T)
