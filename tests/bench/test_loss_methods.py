"""The methods that are compared: names, presets, and what each needs."""

from dataclasses import replace
from functools import partial

import pytest

from clipscale.bench.loss_methods import Case, chosen, find, methods
from clipscale.common.errors import UserError
from clipscale.config.presets import group_options
from clipscale.loss.triton.tuning import Tiles, Tuning, candidates

CPU = Case(64, 512, "fp32", "cpu", 1, 100.0)
CUDA = replace(CPU, device="cuda", dtype="bf16")


def test_every_preset_backend_and_peer_has_a_name() -> None:
    assert set(methods()) == {
        *group_options()["loss"],
        *("tiled", "dense", "triton", "gluon"),
        *("open_clip", "inf_cl", "memeff", "siglip_kernel", "torch", "compile"),
    }


def test_presets_are_those_of_the_configuration() -> None:
    known = methods()
    assert (known["siglip"].objective, known["siglip"].scale, known["siglip"].bias) == ("sigmoid", 10.0, -10.0)
    assert known["lit"].frozen_images
    assert not known["infcl"].frozen_images
    assert known["infcl"].scale is None


def test_an_unknown_method_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        UserError, match=r"methods=opencli: unknown; did you mean 'openclip'.*there are clip, .*compile"
    ):
        chosen("infcl,opencli", "cpu", 1)


def test_a_method_named_twice_is_measured_once() -> None:
    assert [method.name for method in chosen("infcl, torch,infcl", "cpu", 1)] == ["infcl", "torch"]


def test_by_default_other_kernels_are_compared_where_they_can_run() -> None:
    kernels = {"inf_cl", "memeff", "siglip_kernel"}
    assert not kernels & {method.name for method in chosen("auto", "cpu", 1)}
    assert kernels <= {method.name for method in chosen("auto", "cuda", 1)}
    assert [method.name for method in chosen("auto", "cpu", 4)] == ["clip", "openclip", "disco", "ring", "infcl"]


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("triton", CPU, "need CUDA"),
        ("triton", CUDA, None),
        ("inf_cl", CPU, "need CUDA"),
        ("inf_cl", CUDA, None),
        ("inf_cl", replace(CUDA, d=640), "D=640 is no multiple of 256"),
        ("inf_cl", replace(CUDA, n=100), "N=100 is no multiple of 64"),
        ("inf_cl", replace(CUDA, ranks=2), "one rank"),
        ("memeff", CPU, "need CUDA"),
        ("memeff", replace(CUDA, d=96), "D=96 is no multiple of 64"),
        ("memeff", replace(CUDA, n=100), None),
        ("siglip_kernel", CPU, "need CUDA"),
        ("siglip_kernel", replace(CUDA, n=100, d=96), None),
        ("siglip_kernel", replace(CUDA, ranks=2), "one rank"),
        ("torch", replace(CPU, ranks=2), "one rank"),
        ("infcl", replace(CPU, ranks=2), None),
    ],
)
def test_a_case_that_a_method_cannot_do_has_its_reason(name: str, case: Case, reason: str | None) -> None:
    found = methods()[name].obstacle(case)
    assert found is None if reason is None else reason in str(found), f"{name}: {found}"


def test_matmuls_inside_kernels_are_not_counted_as_if_seen() -> None:
    known = methods()
    seen = {name: (known[name].visible(CPU), known[name].visible(CUDA)) for name in known}
    assert seen["infcl"] == (True, False)
    assert seen["tiled"] == seen["clip"] == seen["open_clip"] == (True, True)
    assert seen["inf_cl"] == seen["memeff"] == seen["siglip_kernel"] == seen["compile"] == (False, False)


def test_the_kernels_of_siglip_are_compared_with_its_preset() -> None:
    ours, theirs = find(["siglip", "siglip_kernel"])
    assert (theirs.objective, theirs.scale, theirs.bias) == (ours.objective, ours.scale, ours.bias)


def test_a_peer_that_is_not_installed_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.bench.loss_methods.find_spec", lambda _: None)
    for name in ("memeff", "siglip_kernel", "inf_cl"):
        method = methods()[name]
        assert not method.installed and method.package == name and "(not installed)" in method.about


def test_a_choice_of_the_kernels_has_a_name() -> None:
    tiles, panel = find(["triton-tiles-128x256x64-8w-3s-168r", "triton-panel-64M"])
    for method, tuning in (
        (tiles, Tuning(tiles=Tiles(128, 256, 64, 8, 3, 168))),
        (panel, Tuning(panel_bytes=64 << 20)),
    ):
        loss = method.build(CUDA, 0)
        assert isinstance(loss, partial) and loss.keywords["tuning"] == tuning, method.name
    assert not tiles.visible(CUDA) and "need CUDA" in str(panel.obstacle(CPU))
    with pytest.raises(UserError, match="methods=triton-tiles-1: unknown"):
        find(["triton-tiles-1"])


def test_every_candidate_of_the_tile_table_is_a_method() -> None:
    found = chosen("triton,triton-tiles", "cuda", 1)
    assert [x.name for x in found[1:]] == [f"triton-tiles-{tiles}" for tiles in candidates("half")]
