"""`python -m tests.models.eight_bit_error`: how far a step in bf16, fp8 and int8 is from float32, for the figures in docs/step.md.

ViT-B-32 with random weights, eight random pairs in one chunk. Distances are Euclidean norms, relative to that of float32.
"""

import copy

import torch
from torch import Tensor

from clipscale.config.sections import ModelConfig, PrecisionConfig
from clipscale.loss.api import contrastive_loss
from clipscale.models.towers import ClipModel, build_model
from clipscale.step.grad_cache import GradCache
from clipscale.step.precision import Precision

PAIRS = 8


def step(model: ClipModel, precision: Precision) -> list[Tensor]:
    """Features of images and texts, and all gradients of each tower in a row."""
    for tower in (model.image, model.text):
        precision.convert(tower)
    cache = GradCache(
        [model.image, model.text],
        lambda u, v: contrastive_loss(u, v, model.logit_scale.exp()),
        chunks=PAIRS,
        autocast=precision.autocast,
    )
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (PAIRS, 3, 224, 224), dtype=torch.uint8, generator=generator)
    tokens = torch.randint(1, 49000, (PAIRS, 77), generator=generator)
    features = cache.encode(pixels, tokens)
    cache.backward(cache.loss(*features))
    cache.replay()
    gradients = [
        torch.cat([p.grad.flatten() for p in tower.parameters() if p.grad is not None])
        for tower in (model.image, model.text)
    ]
    return [*(x.detach().float() for x in features), *gradients]


def main() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="ViT-B-32"))
    answers = {
        name: step(copy.deepcopy(model), Precision(PrecisionConfig(name=name), torch.device("cpu")))
        for name in ("fp32", "bf16", "fp8", "int8")
    }
    print("| precision | image features | text features | image gradients | text gradients |\n|---|--:|--:|--:|--:|")
    for name, found in answers.items():
        distances = [float((x - y).norm() / y.norm()) for x, y in zip(found, answers["fp32"])]
        print(f"| {name} | " + " | ".join(f"{d:.3f}" for d in distances) + " |")


if __name__ == "__main__":
    main()
