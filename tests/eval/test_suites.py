"""Suites: sets are found by their published names, the missing ones are named, and columns are means of results."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from clipscale.common.errors import UserError
from clipscale.config.sections import SUITES, EvalConfig
from clipscale.config.tools import EvalRunConfig
from clipscale.eval import suites
from clipscale.eval.run import evaluate
from clipscale.eval.sets import known as known_module
from clipscale.eval.sets.known import known_sets, table
from clipscale.eval.suites import chosen_sets, suite_sets, suite_table
from clipscale.eval.verb import main
from clipscale.models.towers import build_model
from tests.eval.sets import (
    ALONE,
    COLOURS,
    NAMES,
    ColourModel,
    classification_set,
    karpathy_json,
    picture,
    retrieval_set,
    write_shards,
)
from tests.eval.test_compositional import colour, winoground
from tests.eval.test_layouts import folders
from tests.eval.test_verb import TINY, save


def infcl(root: Path) -> Path:
    """The sets of Inf-CL's table, with 0 to 4 of six pictures wrong, in three layouts' names."""
    names = ("wds_imagenet1k", "wds_imagenetv2_test", "objectnet", "wds_imagenet-a", "imagenet-r")
    for wrong, name in enumerate(names):
        classification_set(root / name, wrong=range(wrong))
    retrieval_set(root / "wds_mscoco_captions")
    return root


def test_the_table_is_whole() -> None:
    assert ("none", *table()["suites"]) == SUITES, "the setting's choices are the table's suites"
    for name, suite in table()["suites"].items():
        assert len(set(suite["sets"])) == len(suite["sets"]) and set(suite["sets"]) <= set(known_sets()), name
        for column in suite["columns"].values():
            entries = suite["sets"] if column == "all" else column
            assert {entry.partition(":")[0] for entry in entries} <= set(suite["sets"]), (name, column)
    assert len(table()["suites"]["datacomp"]["sets"]) == 38 and len(table()["suites"]["vtab"]["sets"]) == 19
    everywhere = [name for known in known_sets().values() for name in known.candidates]
    assert len(everywhere) == len(set(everywhere)), "a folder belongs to one set"


def test_the_columns_of_infcls_table_are_means_of_the_results(tmp_path: Path) -> None:
    config = EvalConfig(suite="infcl-table3", root=str(infcl(tmp_path)))
    results = evaluate(ColourModel(), config, ALONE, run_dir=tmp_path / "run", step=1)
    shown = suite_table(config, chosen_sets(config), results, "b16")
    assert shown.heads == [
        "infcl-table3", "ImageNet Validation", "v2", "ObjectNet", "OOD", "MSCOCO R@1 I→T", "T→I"
    ]  # fmt: skip
    assert shown.groups == [
        [["b16", "100.00", "83.33", "66.67", f"{100 * (3 / 6 + 2 / 6) / 2:.2f}", "100.00", "100.00"]]
    ]
    record = json.loads((tmp_path / "run/eval/step_00000001.json").read_text())
    assert record["results"]["imagenet-a"]["main"] == 3 / 6 and record["measured"]["imagenet-a"]["main"] == ["top1"]


def test_missing_sets_are_named_with_their_source_and_the_others_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classification_set(tmp_path / "wds_imagenet1k_test")
    (tmp_path / "imagenet-r.tar.gz").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        found = suite_sets("infcl-table3", str(tmp_path))
    assert [item.name for item in found] == ["imagenet1k"]
    assert len(caplog.messages) == 5 and not any("\n" in message for message in caplog.messages)
    assert any("objectnet is missing" in m and "https://objectnet.dev" in m for m in caplog.messages), caplog.messages
    assert any(f"give {tmp_path / 'imagenet-r.tar.gz'} in eval.sets" in m for m in caplog.messages), caplog.messages
    config = EvalConfig(suite="infcl-table3", root=str(tmp_path))
    row = suite_table(config, found, {"imagenet1k": {"main": 0.5}}, "b16").groups[0][0]
    assert row == ["b16", "50.00", "-", "-", "-", "-", "-"]
    results = {"imagenet1k": {"main": 0.5}, "imagenet-a": {"main": 0.25}}
    (tmp_path / "imagenet-a").symlink_to(tmp_path / "wds_imagenet1k_test")
    row = suite_table(config, suite_sets("infcl-table3", str(tmp_path)), results, "b16").groups[0][0]
    assert row == ["b16", "50.00", "-", "-", "-", "-", "-"], "no mean of a part of the out-of-distribution sets"


def test_a_root_without_sets_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"holds none of the 19 sets of suite=vtab; vtab/caltech101 is looked for as wds_"
    ):
        suite_sets("vtab", str(tmp_path))
    with pytest.raises(UserError, match="there is no such folder"):
        suite_sets("vtab", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"suite=vtab needs eval\.root=DIR"):
        suite_sets("vtab", None)
    infcl(tmp_path)
    with pytest.raises(UserError, match=r"objectnet is in suite=infcl-table3 too"):
        chosen_sets(EvalConfig(suite="infcl-table3", root=str(tmp_path), sets=[str(tmp_path / "objectnet")]))


def test_a_place_within_a_folder_comes_before_the_folder(tmp_path: Path) -> None:
    """As ImageNet, COCO and Winoground are unpacked."""
    folders(tmp_path / "imagenet" / "val", ["n01498041", "n01443537"])
    folders(tmp_path / "imagenet" / "train", ["n01498041", "n01443537"])
    karpathy_json(tmp_path / "flickr30k").rename(tmp_path / "flickr30k" / "dataset_flickr30k.json")
    winoground(tmp_path / "winoground" / "data", colour)
    found = [*suite_sets("infcl-table3", str(tmp_path)), *suite_sets("retrieval", str(tmp_path))]
    assert [item.name for item in found] == ["imagenet1k", "flickr30k", "winoground"]
    assert [item.path.name for item in found] == ["val", "dataset_flickr30k.json", "data"]
    assert found[0].classnames == ["goldfish", "stingray"] and len(found[0].templates) == 80


def test_prompts_are_chosen_and_change_the_name_of_the_figures(tmp_path: Path) -> None:
    root = str(classification_set(tmp_path / "imagenet-a"))
    own = tmp_path / "mine.txt"
    own.write_text("the colour {c}\n{}!\n")
    counts = {"80": 80, "7": 7, "simple": 1, str(own): 2}
    for name, count in counts.items():
        (item,) = chosen_sets(EvalConfig(sets=[root], prompts=name))
        assert len(item.templates) == count and item.label() == f"imagenet-a (prompts {Path(name).stem})"
    (tmp_path / "imagenet-a/zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")
    suites.load_set.cache_clear()
    (item,) = chosen_sets(EvalConfig(sets=[root], prompts="simple", limit=3))
    assert item.label() == "imagenet-a (limit 3)", "its own prompts leave the name as it is"
    with pytest.raises(UserError, match=r"eval\.prompts=9: choose 80, 7 or simple, or give a file"):
        chosen_sets(EvalConfig(sets=[root], prompts="9"))


def test_prompts_and_names_of_published_sets_come_from_clip_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders(tmp_path / "dtd", ["banded", "blotchy"])
    folders(tmp_path / "svhn", [str(digit) for digit in range(10)])
    dtd, svhn = suite_sets("vtab", str(tmp_path))
    assert (dtd.name, dtd.classnames, len(dtd.templates)) == ("vtab/dtd", ["banded", "blotchy"], 8)
    assert svhn.classnames[:2] == ["zero", "one"] and len(svhn.templates) == 6 and svhn.labels[0] == 0
    monkeypatch.setattr(known_module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="vtab/dtd brings no prompts; pip install clip-benchmark"):
        suite_sets("vtab", str(tmp_path))


def test_main_metrics_of_datacomp(tmp_path: Path) -> None:
    """Mean class recall, macro F1, and the worst group, by the metadata beside the labels."""
    shown = [*range(6), 0, 0, 1]
    groups = [7, 7, 7, 9, 9, 9, 9, 5, 5]
    labels = [0, 1, 2, 3, 4, 5, 1, 0, 1]  # the seventh picture is wrong
    members = []
    for i, (seen, label) in enumerate(zip(shown, labels)):
        metadata = Path(tmp_path / "m.npy")
        np.save(metadata, np.array([groups[i], 3]))
        members += [(f"{i}.png", picture(NAMES[seen])), (f"{i}.cls", str(label).encode())]
        members += [(f"{i}.npy", metadata.read_bytes())]
    files = {"classnames.txt": "\n".join(NAMES), "zeroshot_classification_templates.txt": "{c}"}
    for name in ("wilds-fmow", "wilds-iwildcam", "vtab-pets", "imagenet-o"):
        write_shards(tmp_path / f"wds_{name}_test", [members], files)
    results = evaluate(ColourModel(), EvalConfig(suite="datacomp", root=str(tmp_path)), ALONE)
    assert results["wilds/fmow"]["main"] == results["wilds/fmow"]["worst_group_top1"] == 3 / 4
    f1 = [2 * 2 / (2 + 3), 2 * 2 / (3 + 2), 1, 1, 1, 1]
    assert results["wilds/iwildcam"]["main"] == pytest.approx(sum(f1) / 6)
    assert results["vtab/pets"]["main"] == pytest.approx((1 + 2 / 3 + 4) / 6)
    assert results["imagenet-o"]["main"] == results["imagenet-o"]["top1"] and "aupr" not in results["imagenet-o"]

    members[2] = ("0.npy", b"x")
    write_shards(tmp_path / "other" / "wds_geode_test", [members], files)
    with pytest.raises(UserError, match=r"sample 0 of .*0\.tar has no group; it needs 0\.npy .*geode comes from https"):
        suite_sets("datacomp", str(tmp_path / "other"))


@pytest.mark.parametrize("broken", [None, "imagenet-o", "imagenet1k"])
def test_imagenet_o_is_judged_beside_imagenets_pictures_of_its_classes(tmp_path: Path, broken: str | None) -> None:
    """The area under the precision-recall curve, against scikit-learn's, and without ImageNet a warning.

    A broken picture counts against the model in either set.
    """
    files = {"classnames.txt": "red\ngreen\nblue", "zeroshot_classification_templates.txt": "{c}"}
    pictures = [m for i, n in enumerate(NAMES[3:]) for m in ((f"{i}.png", picture(n)), (f"{i}.cls", b"1"))]
    write_shards(tmp_path / "imagenet-o", [pictures], files)
    (alone,) = suite_sets("imagenet", str(tmp_path))
    assert alone.metric == () and alone.inliers is None
    classification_set(tmp_path / "imagenet1k", [*NAMES, "red", "green"])
    _, item = suite_sets("imagenet", str(tmp_path))
    assert item.inliers is not None and [item.inliers.labels[i] for i in range(5)] == [0, 1, 2, 0, 1]

    if broken:
        shard = next((tmp_path / broken).rglob("*.tar"))
        content = picture(NAMES[3] if broken == "imagenet-o" else NAMES[0])
        shard.write_bytes(shard.read_bytes().replace(content, bytes(len(content))))
    found = evaluate(ColourModel(), EvalConfig(suite="imagenet", root=str(tmp_path)), ALONE)["imagenet-o"]
    unit = {name: torch.nn.functional.normalize(torch.tensor(c).float() - 125, dim=0) for name, c in COLOURS.items()}
    classes = torch.stack([unit[name] for name in NAMES[:3]])
    shown = [*NAMES[3:], "red", "green", "blue", "red", "green"]
    scores = [-float((unit[name] @ classes.T).softmax(0).max()) for name in shown]
    worst = {"imagenet-o": (0, -2.0), "imagenet1k": (3, 2.0)}  # all other scores are between -1 and 0
    if broken:
        index, score = worst[broken]
        scores[index] = score
    wanted = average_precision_score([1] * 3 + [0] * 5, scores)
    assert found["main"] == found["aupr"] == pytest.approx(wanted, abs=1e-6) and found["top1"] < 1


def test_the_verb_prints_infcls_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save(tmp_path / "run", build_model(TINY), 7)
    (tmp_path / "run/config.yaml").write_text(f"eval:\n  root: '{infcl(tmp_path / 'sets')}'\n")
    main(EvalRunConfig(run=str(tmp_path / "run"), device="cpu", suite="infcl-table3"))
    lines = capsys.readouterr().out.splitlines()
    heads = next(line for line in lines if "infcl-table3" in line)
    assert heads.split("  ")[0].strip() == "infcl-table3" and heads.rstrip().endswith("T→I")
    row = lines[lines.index(heads) + 2]
    assert row.strip().startswith("run, step 7") and len(row.split()) == 9, row
