"""The mean of ImageNet's variants beside ImageNet."""

import pytest

from clipscale.report.robustness import robustness, robustness_tables


def test_variants_are_found_by_their_names_and_compared_with_imagenet_of_the_same_kind() -> None:
    results = {
        "imagenet1k": {"top1": 0.6},
        "imagenetv2-matched-frequency-format-val": {"top1": 0.5},
        "wds_objectnet_test": {"top1": 0.3},
        "imagenet-a": {"top1": 0.1},
        "imagenet-r": {"top1": 0.7},
        "imagenet_sketch": {"top1": 0.4},
        "imagenet-o": {"aupr": 0.9, "top1": 0.0},
        "cifar10": {"top1": 0.9},
        "imagenet1k (ema)": {"top1": 0.8},
        "sketch (ema)": {"top1": 0.2},
        "objectnet (limit 10)": {"top1": 0.1},
    }
    found = robustness(results)
    assert set(found) == {"", "(ema)"}
    assert found[""] == pytest.approx({"imagenet": 0.6, "shifted": 0.4, "gap": 0.2, "kept": 2 / 3, "sets": 5})
    assert found["(ema)"]["gap"] == pytest.approx(0.6)
    (table,) = robustness_tables(results)
    assert table.groups[0][0] == ["robustness", "60.0", "40.0", "20.0", "66.7", "5"]
    assert not robustness_tables({"imagenet1k": {"top1": 0.6}, "cifar10": {"top1": 0.9}})
