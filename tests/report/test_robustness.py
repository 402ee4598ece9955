"""The mean of ImageNet's variants beside ImageNet."""

import pytest

from clipscale.report.robustness import newest_robustness, robustness, robustness_tables


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
    assert found[""] == pytest.approx({"imagenet": 0.6, "shifted": 0.4, "gap": 0.2, "relative": 2 / 3, "sets": 5})
    assert found["(ema)"]["gap"] == pytest.approx(0.6)
    (table,) = robustness_tables(results)
    assert table.groups[0][0] == ["robustness", "60.0", "40.0", "20.0", "66.7", "5"]
    assert table.heads[4:] == ("variants / ImageNet %", "variants")
    assert not robustness_tables({"imagenet1k": {"top1": 0.6}, "cifar10": {"top1": 0.9}})


def test_the_folders_of_imagenet_v2_are_one_variant() -> None:
    own, sketch = {"imagenet1k": {"top1": 0.6}}, {"sketch": {"top1": 0.2}}
    v2 = {
        f"imagenetv2-{name}-format-val": {"top1": top1}
        for name, top1 in (("matched-frequency", 0.4), ("threshold0.7", 0.7), ("top-images", 0.9))
    }
    found = robustness(own | v2 | sketch)[""]
    assert found["sets"] == 2 and found["shifted"] == pytest.approx(0.3), "matched-frequency is the one that counts"
    others = dict(list(v2.items())[1:])
    assert robustness(own | others | sketch)[""]["shifted"] == pytest.approx((0.8 + 0.2) / 2), "else their mean"
    named = {"imagenetv2": {"top1": 0.4}}
    assert robustness(own | others | named | sketch)[""]["shifted"] == pytest.approx(0.3), "a suite's own name for it"


def test_figures_of_one_step_are_compared() -> None:
    """The newest evaluation that has ImageNet and a variant, not the newest of each set."""
    evaluations = [
        {"step": 10, "results": {"imagenet1k": {"top1": 0.4}, "sketch": {"top1": 0.2}}},
        {
            "step": 20,
            "results": {"imagenet1k": {"top1": 0.6}, "imagenet-r": {"top1": 0.3}, "sketch (ema)": {"top1": 0.5}},
        },
        {"step": 30, "results": {"imagenet1k": {"top1": 0.8}, "cifar10": {"top1": 0.9}}},
    ]
    (table,) = newest_robustness(evaluations)
    assert table.groups[0] == [["robustness (step 20)", "60.0", "30.0", "30.0", "50.0", "1"]]
    assert not newest_robustness(evaluations[2:])
