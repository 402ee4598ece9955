"""Suites: sets are found by their published names, the missing ones are named, and columns are means of results."""

import json
import logging
from pathlib import Path

import pytest

from clipscale.config.sections import SUITES, EvalConfig
from clipscale.eval.classification import ClassificationSet
from clipscale.eval.run import ResultsFile, evaluate
from clipscale.eval.sets.known import known_sets
from clipscale.eval.sets.load import load_set
from clipscale.eval.suites import load_chosen_sets, suite_sets, suite_table
from tests.eval.sets import (
    NAMES,
    ColourModel,
    classification_set,
    evaluation,
    folders,
    karpathy_json,
    members,
    retrieval_set,
    shown,
    write_shards,
)
from tests.support.checkpoints import ONE_RANK
from tests.support.user_errors import refused


def infcl(root: Path) -> Path:
    """The sets of Inf-CL's table, with 0 to 4 of six pictures wrong, in three layouts' names."""
    names = ("wds_imagenet1k", "wds_imagenetv2_test", "objectnet", "wds_imagenet-a", "imagenet-r")
    for wrong, name in enumerate(names):
        classification_set(root / name, wrong=range(wrong))
    retrieval_set(root / "wds_mscoco_captions")
    return root


def test_the_table_is_whole() -> None:
    for name, suite in SUITES.items():
        assert len(set(suite["sets"])) == len(suite["sets"]) and set(suite["sets"]) <= set(known_sets()), name
        for column in suite["columns"].values():
            entries = suite["sets"] if column == "all" else column
            assert {entry.partition(":")[0] for entry in entries} <= set(suite["sets"]), (name, column)
    assert len(SUITES["datacomp"]["sets"]) == 33 and len(SUITES["vtab"]["sets"]) == 19
    everywhere = [name for known in known_sets().values() for name in known.candidates]
    assert len(everywhere) == len(set(everywhere)), "a folder belongs to one set"


def test_the_columns_of_infcls_table_are_means_of_the_results(tmp_path: Path) -> None:
    config = EvalConfig(suite="infcl-table3", root=str(infcl(tmp_path)))
    results = evaluate(ColourModel(), evaluation(config), ONE_RANK, file=ResultsFile(tmp_path / "run", 1))
    shown = suite_table(config.suite, load_chosen_sets(config), results, "b16")
    columns = ["ImageNet Validation", "v2", "ObjectNet", "OOD", "MSCOCO R@1 I→T", "T→I"]
    assert shown.heads == ["infcl-table3", *columns]
    ood = f"{100 * (3 / 6 + 2 / 6) / 2:.2f}"
    assert shown.rows == [["b16", "100.00", "83.33", "66.67", ood, "100.00", "100.00"]]
    record = json.loads((tmp_path / "run/eval/step_00000001.json").read_text())
    assert record["results"]["imagenet-a"]["main"] == 3 / 6 and record["measured"]["imagenet-a"]["main"] == ["top1"]


def test_missing_sets_are_named_with_their_source_and_the_others_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classification_set(tmp_path / "wds_imagenet1k_test")
    (tmp_path / "imagenet-a").symlink_to(tmp_path / "wds_imagenet1k_test")
    with caplog.at_level(logging.WARNING):
        sets = suite_sets("infcl-table3", str(tmp_path))
    assert [eval_set.name for eval_set in sets] == ["imagenet1k", "imagenet-a"]
    assert len(caplog.messages) == 4
    assert any("objectnet is missing" in m and "wds_objectnet" in m for m in caplog.messages), caplog.messages
    results = {"imagenet1k": {"main": 0.5}, "imagenet-a": {"main": 0.25}}
    row = suite_table("infcl-table3", sets, results, "b16").rows[0]
    assert row == ["b16", "50.00", "-", "-", "-", "-", "-"], "no mean of a part of the out-of-distribution sets"


def test_a_root_without_sets_is_refused_in_one_line(tmp_path: Path) -> None:
    message = r"holds none of the 19 sets of eval.suite=vtab; vtab/caltech101 is looked for as wds_"
    with refused(message):
        suite_sets("vtab", str(tmp_path))
    with refused(r"eval\.suite=vtab needs eval\.root=DIR"):
        load_chosen_sets(EvalConfig(suite="vtab"))
    with refused(r"eval\.sets: /nowhere does not exist"):
        load_chosen_sets(EvalConfig(sets=["/nowhere"]))
    infcl(tmp_path)
    with refused(r"two sets, .*infcl-table3, are called objectnet; leave one out"):
        load_chosen_sets(EvalConfig(suite="infcl-table3", root=str(tmp_path), sets=[str(tmp_path / "objectnet")]))


def test_a_place_within_a_folder_comes_before_the_folder(tmp_path: Path) -> None:
    """ImageNet and Flickr30k are unpacked in this way."""
    folders(tmp_path / "imagenet" / "val", ["n01498041", "n01443537"])
    folders(tmp_path / "imagenet" / "train", ["n01498041", "n01443537"])
    karpathy_json(tmp_path / "flickr30k").rename(tmp_path / "flickr30k" / "dataset_flickr30k.json")
    sets = [*suite_sets("infcl-table3", str(tmp_path)), *suite_sets("retrieval", str(tmp_path))]
    assert [eval_set.name for eval_set in sets] == ["imagenet1k", "flickr30k"]
    assert [eval_set.path.name for eval_set in sets] == ["val", "dataset_flickr30k.json"]
    imagenet = sets[0]
    assert isinstance(imagenet, ClassificationSet)
    assert imagenet.classnames == ["goldfish", "stingray"] and len(imagenet.templates) == 80


def test_class_folders_without_the_published_prompts_are_refused(tmp_path: Path) -> None:
    root = folders(tmp_path / "dtd", ["banded", "blotchy"])
    with refused("dtd brings no prompts; take the webdataset of vtab/dtd"):
        suite_sets("vtab", str(tmp_path))
    (root / "zeroshot_classification_templates.txt").write_text("a photo of a {c} texture.\n")
    load_set.cache_clear()
    (dtd,) = suite_sets("vtab", str(tmp_path))
    assert isinstance(dtd, ClassificationSet)
    assert (dtd.name, dtd.classnames) == ("vtab/dtd", ["banded", "blotchy"])


def test_the_main_metric_of_some_sets_is_their_mean_class_recall(tmp_path: Path) -> None:
    seen = [*NAMES, NAMES[0], NAMES[0], NAMES[1]]
    samples = members("cls", [*"012345101"], shown(seen))  # the seventh is wrong
    files = {"classnames.txt": "\n".join(NAMES), "zeroshot_classification_templates.txt": "{c}"}
    write_shards(tmp_path / "wds_vtab-pets_test", [samples], files)
    results = evaluate(ColourModel(), evaluation(EvalConfig(suite="datacomp", root=str(tmp_path))), ONE_RANK)
    assert results["vtab/pets"]["main"] == pytest.approx((1 + 2 / 3 + 4) / 6)
