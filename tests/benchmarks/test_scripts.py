"""The benchmarks measure what they say: methods that agree, memory, matmuls, and rows for what fails."""

import importlib
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from clipscale.cli.compose import compose_settings
from clipscale.cli.words import overrides_of
from clipscale.common.errors import UserError
from clipscale.config.checks import check_across_sections
from clipscale.config.presets import group_options
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.step.batch_loss import BatchLoss, LossOptions
from tests.support.towers import small_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`script("loss")`: a benchmark as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def script_settings(module: ModuleType, *words: str) -> SimpleNamespace:
    from measure import settings_of

    return settings_of(module.DEFAULTS, ["device=cpu", *words] if "device" in module.DEFAULTS else words)


@pytest.mark.slow  # tests/loss/test_exact.py has the losses
def test_losses_agree_with_the_oracle_and_ours_takes_four_units_and_little_memory(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = script("loss")
    monkeypatch.setitem(loss.GEMM, "cpu", (256, 1))
    name, jobs = loss.plan(script_settings(loss, "n=1k", "d=32", "methods=infcl,open_clip,siglip,inf_cl", "repeats=1"))
    assert name == "loss-cpu"
    rows = {job["method"]: loss.measure(**job)[0] for job in jobs}
    assert rows.pop("inf_cl")["status"] == "not supported"
    for method, row in rows.items():
        assert row["error"] < 1e-5, f"{method}: {row['error']}"
        assert row["total_s"]["median"] > 0 and row["gemm_fraction"] > 0
    assert (rows["infcl"]["units"], rows["open_clip"]["units"]) == (4, 6)


@pytest.mark.slow  # seven steps; tests/test_exactness.py has the gradients
def test_every_method_computes_the_gradients_of_one_graph(script: Any) -> None:
    step = script("step")
    gradients = {}
    for method in ("plain", "cache", "keep", "unsorted", "unlean", "open_clip", "open_clip-plain"):
        if method.startswith("open_clip"):
            pytest.importorskip("open_clip_train", reason="open_clip's training loop is not installed")
        steps = step.Step(method, "tiny", 4, "fp32", "cpu")
        steps.run(steps.inputs(8), lambda part: None)
        tower = steps.peer if method.startswith("open_clip") else steps.model
        gradients[method] = {name.replace("image.encoder.", "visual."): p.grad for name, p in tower.named_parameters()}
    weight = "visual.conv1.weight"
    for method, actual in gradients.items():
        difference = (actual[weight] - gradients["plain"][weight]).norm() / gradients["plain"][weight].norm()
        if not method.startswith("open_clip"):
            assert difference < 1e-4, f"{method}: {difference:.1e}"
        assert bool(torch.isfinite(actual[weight]).all())


@pytest.mark.slow
def test_a_step_is_timed_and_compared_with_plain(script: Any) -> None:
    step = script("step")
    words = ("model=tiny", "batch=8", "chunk=4", "repeats=1", "methods=plain,cache@16,frozen-plain,frozen", "profile=3")
    _, jobs = step.plan(script_settings(step, *words))
    rows = [{**job, **step.measure(**job)[0]} for job in jobs]
    step.compare(rows)
    cached = next(row for row in rows if row["case"] == "cache@16")
    assert cached["ratio"] == pytest.approx(rows[0]["samples_per_s"] / cached["samples_per_s"])
    assert {"encode_s", "loss_s", "replay_s"} <= cached["parts"].keys()
    assert cached["profile"]["host_share"] == 1, "a CPU waits for no device"
    in_kernels = sum(cached["profile"]["kinds_ms"].values())
    assert cached["profile"]["idle_ms"] == pytest.approx(1e3 * cached["step_s"]["median"] - in_kernels, abs=0.1)
    assert cached["profile"]["launches"] > 4 * len(cached["profile"]["kernels"])
    assert rows[2]["ratio"] == 1, "a frozen tower is compared with its like"
    with pytest.raises(UserError, match="methods=cash: unknown; did you mean 'cache'"):
        step.plan(script_settings(step, "methods=cash"))


@pytest.mark.slow  # it starts processes
def test_starts_messages_and_what_a_step_sends_are_figures(script: Any) -> None:
    scale = script("scale")
    _, jobs = scale.plan(
        script_settings(scale, "shards=64", "ranks=1k", "files=64", "processes=2", "steps=4", "repeats=1")
    )
    start, files, message, ring, gather = [scale.measure(**job)[0]["figures"] for job in jobs]
    assert start["sent to it, MB"] > files["sent to it, MB"] > 0
    assert message["files of a process"] < 12
    assert ring["send"] == 5 * 3 + 2 and ring["allreduce, kB"] >= 4 * ring["parameters"] / 1e3
    assert gather["allgather_base"] == 3 and gather["reduce_scatter_base"] == 2 and "send" not in gather


def test_a_job_that_fails_is_a_row_with_its_reason(script: Any) -> None:
    measure = script("measure")

    def broken(**job: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    assert measure.one_job(broken, {"n": 1}) == [
        {"n": 1, "status": "out of memory", "reason": "RuntimeError: DefaultCPUAllocator: can't allocate memory"}
    ]


def test_wheels_are_what_the_other_machine_lacks(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have = tmp_path / "have.txt"
    have.write_text("# its packages\ntorch\nNumPy\npillow\n")
    monkeypatch.chdir(ROOT)
    names = set(script("missing").missing(have))
    assert {"open-clip-torch", "webdataset", "hydra-core", "inf-cl"} <= names
    assert not {"torch", "numpy", "pillow"} & names


def test_the_sources_words_are_read_before_torch_is_imported(script: Any) -> None:
    """A wrong word, a wrong setting, and a table that is not here, with the way to it; every other one is there."""
    sources = script("sources")
    code = (
        "import sys, sources\n"
        "for word in ['tabel1', 'table3', 'figure5', 'figure1 chunks=3', 'dpr steps=many']:\n"
        "    try: sources.main(word.split())\n"
        "    except sources.UserError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    folders = f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": folders}, capture_output=True, text=True)
    expected = (
        "table1, table2",
        "=infcl-vit-b16-lit",
        "=infcl-vit-b32-cc12m",
        "did you mean 'chunk'",
        "'many'",
        "False",
    )
    for line, part in zip(done.stdout.splitlines(), expected, strict=True):
        assert part in line, done.stdout + done.stderr
    tables = script("source_tables")
    assert all(callable(getattr(tables, name)) for name in sources.TABLES)
    presets = {word for text in sources.MISSING.values() for word in re.findall("experiment=([a-z0-9-]+)", text)}
    assert presets <= {*group_options()["experiment"]}


@pytest.mark.slow
def test_the_sources_tables_are_printed_and_say_what_is_exact(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sources = script("sources")
    assert all(0.6 < row["loss"] / row["theirs"] <= 1.1 for row in sources.main(["table4"]))
    errors = {(row["name"], row["ranks"]): row["error"] for row in sources.main(["discrepancy"])}
    assert max(error for (name, _), error in errors.items() if name.startswith(("clipscale", "gather"))) < 1e-12
    assert errors["naive gather", 4] == pytest.approx(0.75) and errors["local loss", 2] > 0.1
    rows = sources.main(["figure1", "batches=16", "chunk=8", "repeats=1"])
    assert {row["way"]: row["error"] < 1e-5 for row in rows}["accumulation"] is False
    assert all(row["error"] < 1e-5 for row in rows if row["way"] != "accumulation")
    assert sources.main(["dpr", "steps=1"])[0]["error"] < 1e-4
    assert "| gradient cache |" in capsys.readouterr().out


def test_what_a_written_caption_names_is_compared_with_its_pictures_objects(script: Any) -> None:
    captioner = script("captioner")
    own = "One scarlet plus sign left of an orange disc."
    assert captioner.objects_of(own) == [("red", "cross"), ("orange", "circle")]
    named = {
        "the red cross below a pink star": {"colour": True, "shape": True, "both": True},
        "a picture of a red circle": {"colour": True, "shape": True, "both": False},
        "a pink star right of a red cross": {"colour": False, "shape": False, "both": False},
        "a picture of": {"colour": False, "shape": False, "both": False},
    }
    for written, expected in named.items():
        assert captioner.names(written, own) == expected, written
    assert captioner.totals([captioner.names(written, own) for written in named]) == {
        "pictures": 4,
        "colour": 2,
        "shape": 2,
        "both": 1,
    }


def test_a_change_is_golden_if_all_curves_are_those_of_the_other_commit(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the commits are not here")
    golden = script("golden")
    steps = [(4.5, 13.5), (4.4, 12.5), (4.3, 11.5)]

    def curve(tree: Path, words: str, run: Path) -> list[tuple[float, float]]:
        assert (tree / "clipscale/train.py").is_file(), "the whole tree of the commit"
        of_this_tree = {"sigmoid": steps[:2] + [(4.3, 11.6)], "ring": steps[:2], "bf16": []}
        return of_this_tree.get(run.name.removesuffix("-now"), steps)

    monkeypatch.setattr(golden, "curve", curve)
    assert golden.main(["commit=HEAD", "runs=plain,stages"]) is True
    assert golden.main(["commit=HEAD", "runs=plain,sigmoid,ring,bf16"]) is False
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [
        "plain: bit-equal", "sigmoid: differs from step 3", "ring: differs from step 3", "bf16: not run",
    ]  # fmt: skip
    for word, reason in (("commit=nowhere", "git does not know it"), ("runs=rings", "known are plain, ")):
        with pytest.raises(UserError, match=reason):
            golden.main([word])


@pytest.mark.slow  # each is composed
def test_golden_runs_have_settings_that_there_are(script: Any, tmp_path: Path) -> None:
    golden = script("golden")
    for words in golden.RUNS.values():
        line = overrides_of("train", [*golden.COMMON.split(), *words.split(), f"run={tmp_path}"])[1]
        check_across_sections(compose_settings("train", line))


@pytest.mark.slow  # it trains twice
def test_a_golden_run_is_trained_and_read(script: Any, tmp_path: Path) -> None:
    golden = script("golden")
    first, again = (golden.curve(ROOT, "samples=128", tmp_path / name) for name in ("first", "again"))
    assert len(first) == 2 and golden.comparison(first, again) == golden.EQUAL
    assert golden.comparison(first, golden.curve(ROOT, "samples=128 seed=1", tmp_path / "other")).endswith("step 1")


@pytest.mark.slow  # four whole steps; step/cache/test_cast_weights.py has the gradients
def test_products_in_float32_are_no_farther_from_float64_than_autograds_sums(script: Any) -> None:
    (row,) = script("rounding").measure("tiny", batch=16, chunk=4, precision="bf16")
    for of in ("matrices", "all"):
        assert 1e-4 < row["float32"][of] <= 1.05 * row["autograd"][of] < 0.1, row
        assert row["once"][of] <= 1.05 * row["autograd"][of], row


def test_an_optimizers_step_is_timed_beside_timms_and_ends_at_the_same_weights(script: Any) -> None:
    optim = script("optim")
    rows = {row["way"]: row for row in optim.measure("tiny", "adamw", repeats=1)}
    assert rows["ours"]["difference"] == 0 and 0 < rows["timm's"]["difference"] < 1e-6
    assert all(row["step_s"]["median"] > 0 for row in rows.values())
    with pytest.raises(UserError, match="optimizers=adam: known are adamw, muon; did you mean 'adamw'"):
        optim.plan(script_settings(optim, "optimizers=adam"))


def test_accumulation_takes_what_a_step_gives_its_loss(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["accumulation.py", "experiment=demo", "cache.chunk=2"])
    accumulation = script("accumulation")
    model = small_model()
    u, v = torch.nn.functional.normalize(torch.randn(2, 4, 8), dim=-1)
    options = LossOptions(sameness_keys=torch.arange(4), teacher_features=[])
    value = accumulation.loss_of_chunks(BatchLoss(model, nullcontext), u, v, **options)
    scale = model.logit_scale.exp()
    chunks = [dense_contrastive_loss(u[rows], v[rows], scale) for rows in (slice(0, 2), slice(2, 4))]
    assert value.item() == pytest.approx(sum(chunk.item() for chunk in chunks) / 2)
