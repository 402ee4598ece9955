"""`clipscale plan`: the conclusion, time and JSON (the plan of a run that starts: cli/test_planned)."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.cli.compose import compose_settings
from clipscale.cli.main import main
from clipscale.cli.words import overrides_of
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.hardware import HARDWARE
from clipscale.common.units import format_count, parse_count
from clipscale.config.model import ModelConfig
from clipscale.models.towers import build_model
from clipscale.tools.plan import planner, step_time
from clipscale.tools.plan.assumed import ASSUMED
from clipscale.tools.plan.dry_run import dry_run
from clipscale.tools.plan.planner import plan
from clipscale.tools.plan.prediction import Prediction
from clipscale.tools.plan.render import render
from clipscale.tools.plan.settings import PlanConfig, on_machine, target_gpu
from tests.conftest import TINIEST, Capture
from tests.data.shards.test_subset import EPOCH, FULL, WEIGHTS, weighed, write
from tests.support.user_errors import refused

LARGE = (*TINIEST, "hardware=A800-80G", "gpus=8", "host_memory=1024G")


def plan_settings(*words: str) -> Any:
    return compose_settings("plan", overrides_of("plan", words)[1])


def plans(*settings: PlanConfig) -> list[dict[str, Any]]:
    """Plans that differ in nothing but chunks, kept graphs and buffers, by one dry run."""
    gpu = target_gpu(settings[0])
    with planner.open_prediction(settings[0], gpu) as first:
        return [Prediction(config, gpu, first.dry_run).result() for config in settings]


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give models of any size a speed."""
    monkeypatch.setattr(step_time, "MIN_FLOPS", 0)


@pytest.fixture
def largest_batch_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the largest batch takes as long as the plan."""
    monkeypatch.setattr(Prediction, "largest_batch", lambda self: 4096)


@pytest.mark.usefixtures("of_any_size")
def test_a_large_batch_of_a_small_model_fits(capsys: Capture) -> None:
    status = main(["plan", *LARGE, "batch=1M", "cache.chunk=1k", "samples=32M"])
    out, err = capsys.readouterr()
    assert (status, re.sub(r"^[\d:]{8} loading torch \.\.\.\n", "", err)) == (0, "")
    first, speed, length, largest = out.splitlines()[:4]
    assert first.startswith("yes: it fits: ") and "GiB usable on each GPU" in first
    assert "images/s per GPU" in speed and "a plain step" in speed and "By what is known" in speed
    assert "for 33.6M samples; a step takes about" in length
    assert re.match(r"largest batch with these chunks: \d+M$", largest)
    assert "tiny, batch 1M: 128k samples on each of 1 x 8 x A800-80G" in out
    assert "batch=1M for 33.6M samples: in published sweeps of that length 4k was best" in out
    assert not re.search(r"\d{7}|e\+", out), "no raw integers"


@pytest.mark.usefixtures("largest_batch_known")
def test_adapters_take_little_beside_their_frozen_weights(capsys: Capture) -> None:
    pytest.importorskip("peft", reason="peft is not installed (clipscale[lora])")
    words = [*TINIEST, "batch=256", "hardware=a100-80g", "optim=adamw", "cache.chunk=256", "model.lora=8"]
    assert main(["plan", *words, "json=true"]) == 0
    planned = json.loads(capsys.readouterr().out)
    trained = planned["parameters"]["trained"]
    every = planned["parameters"]["all"]
    with torch.device("meta"):
        without = build_model(plan_settings(*TINIEST).model)
    assert every - trained == sum(p.numel() for p in without.parameters()) - 1, "but for the logit scale"
    # A number in float32, AdamW's two moments of what trains, and cuBLAS's workspaces.
    held = planned["device"]["phases"]["encode"]["before_bytes"]
    assert held == pytest.approx(4 * (every + 2 * trained) + ASSUMED.workspace_bytes, rel=0.05)
    page = render("page", **planned, config=plan_settings(*words), here=False)
    assert re.search(r"\S+k of \S+M parameters train; the others have no gradients", page)


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.slow  # the test below plans a captioner, too
def test_a_captioners_decoder_takes_its_memory_and_its_time() -> None:
    words = ["model=coca-tiny", "batch=4k", "hardware=a100-80g", "cache.chunk=256", "cache.keep=none", "optim=adamw"]
    alone, both = (plan(plan_settings(*words, f"caption.weight={weight}"), search=False) for weight in (0, 2))
    phases = {name: both["device"]["phases"][name]["extra_bytes"] for name in ("encode", "replay")}
    pairs = 256
    labels = 27
    vocabulary = 49408
    logits = pairs * labels * vocabulary
    assert phases["replay"] > 2 * 4 * logits > phases["encode"], "the first pass has no logits"
    decoder = both["parameters"]["trained"] - alone["parameters"]["trained"]
    assert decoder > 128 * vocabulary
    held = [plan["device"]["phases"]["encode"]["before_bytes"] for plan in (both, alone)]
    assert held[0] - held[1] == pytest.approx(2 * 4 * decoder, rel=0.1), "AdamW's moments"
    assert both["time"]["step_s"] > 1.5 * alone["time"]["step_s"]
    assert both["chunk"] == {"image": 256, "text": 256}
    assert both["second_pass"] == {"image": 1.0, "text": 1.0}


@pytest.mark.usefixtures("of_any_size")
def test_a_frozen_image_tower_of_a_captioner_has_one_pass_for_images_whose_tokens_are_kept() -> None:
    words = ["model=coca-tiny", "batch=4k", "hardware=a100-80g", "cache.chunk=256", "model.image.train=none"]
    again, half, once = plans(*(plan_settings(*words, f"cache.keep={keep}") for keep in (0, "14M", "56M")))
    # 25 tokens and a feature, of 128 numbers in bf16.
    size = 26 * 128 * 2
    assert [plan["second_pass"]["image"] for plan in (again, half, once)] == pytest.approx([1.0, 0.5, 0.0], abs=0.1)
    assert once["second_pass"]["text"] == 1.0
    held = [plan["device"]["phases"]["replay"]["before_bytes"] for plan in (again, once)]
    assert held[1] - held[0] == pytest.approx(4096 * size, rel=0.1)
    times = [plan["least_step_s"] for plan in (again, half, once)]
    assert times[0] > times[1] > times[2]


def test_chunks_that_are_too_large_for_a_cpu_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captioner's logits, 27 x 49,408 numbers of each pair, of 256 pairs at once take more than the machine has.

    One dry run serves every size of the chunks.
    """
    opened = []

    def counted(*given: Any) -> Any:
        opened.append(given)
        return dry_run(*given)

    monkeypatch.setattr(planner, "dry_run", counted)
    words = ["model=coca-tiny", "batch=1k", "hardware=cpu", "host_memory=6G", "precision=fp32", "optim=adamw"]
    result = plan(plan_settings(*words), search=False)
    assert (result["fits"], result["chunk"]["image"], result["remedies"]) == (False, 256, ["cache.chunk=64"])
    assert len(opened) == 1


RESNET = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64},
    "text_cfg": {"context_length": 16, "vocab_size": 1000, "width": 64, "heads": 2, "layers": 1},
}
# With these settings few remedies are left, and the run does not fit.
NOT_FITTING = (
    *("data.buffers=1", "cache.keep=none", "model.grad_checkpointing=true", "optim=lamb"),
    *("hardware=cpu", "host_memory=1G"),
)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # A batch smaller than cache.chunk=64, and an optimizer that launch.parallel=zero3 does not take.
        (ModelConfig(""), (*TINIEST, "batch=32")),
        # A tower with batch normalisation, whose batch is one chunk.
        pytest.param(ModelConfig("resnet", RESNET), ("batch=128",), marks=pytest.mark.slow),
    ],
)
def test_a_remedy_that_does_not_go_with_the_run_is_passed_over(config: ModelConfig, words: tuple[str, ...]) -> None:
    """It ended the plan with an error about a setting that nobody had typed."""
    settings = plan_settings(*words, *NOT_FITTING)
    result = plan(replace(settings, model=config) if config.name else settings, search=False)
    assert (result["fits"], result["remedies"]) == (False, [])


@pytest.mark.usefixtures("of_any_size", "largest_batch_known")
def test_host_memory_that_nobody_limits_is_said_to_be_unchecked(capsys: Capture) -> None:
    words = ["batch=64k", "hardware=h100-80g", "gpus=8", "cache.chunk=1k", "optim.lr=1e-3"]
    assert main(["plan", *TINIEST, *words, "eval.sets=[somewhere]", "epochs=30"]) == 0
    out = capsys.readouterr().out
    assert "epochs=30 are of an unknown set" in out
    assert out.startswith("yes: it fits the GPUs: ") and "of host memory, which is not checked" in out


@pytest.mark.usefixtures("largest_batch_known")
@pytest.mark.parametrize(
    ("memory", "status", "first"), [("64G", 0, "yes: it fits: "), ("1G", 1, "no: it does not fit: ")]
)
def test_a_machine_without_a_gpu_is_planned_for_by_its_memory(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, memory: str, status: int, first: str
) -> None:
    monkeypatch.setattr("clipscale.tools.plan.settings.gpu_here", lambda: None)
    monkeypatch.setattr("clipscale.common.memory.free_memory", lambda: parse_count(memory))
    monkeypatch.setattr(planner, "possible_remedies", lambda config: [])  # each may take a dry run
    hardware = [] if status else ["hardware=cpu"]
    assert main(["plan", *TINIEST, "batch=64", "cache.chunk=16", *hardware]) == status
    out = capsys.readouterr().out
    assert out.startswith(first) and ("planned for this machine, without a GPU" in out) == (not hardware)


def test_a_plan_goes_without_a_tokenizer_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then plans for captions that keep their padding, which take more memory."""

    def refuse(*given: object) -> None:
        raise UserError("the tokenizer cannot be fetched")

    monkeypatch.setattr("clipscale.data.tokenizer._loaded", refuse)
    monkeypatch.setattr(
        "clipscale.tools.plan.dry_run.may_cut_captions", lambda _, tokenizer: bool(len(tokenizer([""])))
    )
    with dry_run(plan_settings(*TINIEST, "batch=64", "cache.chunk=16"), 1, None) as run:
        assert run.caption_share == 1


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        ((), ("h100-80g", 8, 1)),
        (("launch.procs=2",), ("h100-80g", 2, 1)),
        (("gpus=2", "nodes=4"), ("h100-80g", 2, 4)),
        (("nodes=4",), ("h100-80g", 8, 4)),
        (("device=cpu",), ("cpu", 1, 1)),
        (("device=cpu", "launch.procs=4"), ("cpu", 4, 1)),
        (("device=cpu", "gpus=2"), ("cpu", 2, 1)),
    ],
)
def test_a_plan_for_this_machine_is_for_the_processes_of_the_run(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], machine: tuple[str, int, int]
) -> None:
    monkeypatch.setattr("clipscale.tools.plan.settings.gpu_here", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    config = on_machine(plan_settings(*TINIEST, *words))
    assert (config.hardware, config.gpus, config.nodes) == machine


def test_a_gpu_that_the_table_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.tools.plan.settings.gpu_here", lambda: "Voodoo 2")
    with refused("hardware is not set, and Voodoo 2 is not in the table"):
        on_machine(plan_settings(*TINIEST))


@pytest.mark.usefixtures("largest_batch_known")
def test_an_epoch_is_counted_by_the_weights_where_the_shards_are(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "here", FULL)
    file = weighed(tmp_path / "w.parquet", WEIGHTS)
    here, elsewhere = (
        (*TINIEST, f"data.train={tmp_path}/{name}", f"data.sample_weights={file}", "hardware=cpu")
        for name in ("here", "elsewhere")
    )
    assert main(["plan", *here]) == 0
    assert f"samples in an epoch: {EPOCH}," in capsys.readouterr().out
    assert planner.epoch_samples(plan_settings(*elsewhere)) is None


def test_a_loss_of_samples_that_repeat_is_planned_with_their_keys(tmp_path: Path) -> None:
    for repeats in (True, False):
        weights = (f"data.sample_weights={weighed(tmp_path / 'w.parquet', WEIGHTS)}",) if repeats else ()
        config = plan_settings(*TINIEST, *weights, "hardware=h100-80g")
        with planner.open_prediction(on_machine(config), HARDWARE["h100-80g"]) as opened:
            loss: Any = opened.dry_run.step.cache.loss
            assert loss.uses_sameness_keys == repeats
    config = plan_settings(*TINIEST, f"data.sample_weights={tmp_path}/elsewhere.parquet", "hardware=h100-80g")
    with planner.open_prediction(config, HARDWARE["h100-80g"]):
        assert planner.epoch_samples(config) is None, "a plan needs no file of weights"


def test_what_does_not_fit_names_what_does() -> None:
    config = plan_settings(*TINIEST, "batch=1M", "hardware=h100-80g", "cache.chunk=1k", "host_memory=8G")
    result = plan(config)
    assert not result["fits"] and result["largest_batch"] < 2**20
    batch = format_count(result["largest_batch"])
    assert result["conclusion"].endswith(f"try data.buffers=1, or batch={batch}")
    assert plan(replace(config, batch=result["largest_batch"]))["fits"]


@pytest.mark.slow
def test_what_does_not_fit_names_the_loss_that_does() -> None:
    words = ("batch=128k", "hardware=a800-80g", "gpus=8", "loss=clip")
    result = plan(plan_settings(*TINIEST, *words), search=False)
    assert result["remedies"] == ["loss=infcl"] and result["conclusion"].endswith("; try loss=infcl")


def test_graphs_are_kept_in_the_memory_that_a_second_pass_does_not_need() -> None:
    """Kept graphs are used up before the first of the same tower's chunks is encoded again."""
    result = plan(plan_settings("batch=8k", "hardware=h100-80g", "gpus=8", "model=vit-b16"), search=False)
    assert result["second_pass"] == {"image": 0.0, "text": 0.0}
    assert result["chunk"] == {"image": 512, "text": 512}
    assert result["peak_bytes"] <= 0.91 * result["device"]["usable_bytes"]
    low, high = result["time"]["range"]
    assert low < 8 * 2603 < 8 * 2915 < high, "an H100 with all graphs kept: in chunks of 256, and in one"


def test_the_exchange_is_the_one_that_the_run_takes() -> None:
    for batch, nodes, exchange in (("1M", 1, "ring"), ("8k", 1, "gather"), ("1M", 4, "gather")):
        config = plan_settings(*TINIEST, f"batch={batch}", "hardware=h100-80g", "gpus=8", f"nodes={nodes}")
        with planner.open_prediction(config, target_gpu(config)) as opened:
            assert opened.dry_run.config.loss.exchange == exchange


# Images/s per GPU, by three quarters for the fourth pass: plain steps that were measured on an H100 (2,950 to 3,271 of
# B/16, 800 to 856 of L/14), at the same share of the peak for other sizes and, up to 1.2 times as much, of other chips.
# SigLIP's B/16 has 1.13 times the operations of CLIP's.
CACHED = files.read_yaml(Path(__file__).with_name("cached.yaml"))


def test_a_model_that_is_smaller_than_all_that_are_known_has_no_speed() -> None:
    result = plan(plan_settings(*TINIEST, "batch=1k", "hardware=rtx4090-24g"), search=False)
    assert result["time"] is result["step_s"] is None and result["fits"]


@pytest.mark.parametrize(
    "words", [pytest.param(w, marks=pytest.mark.slow if i else []) for i, w in enumerate(CACHED)], ids=lambda w: w[:14]
)
def test_the_speed_of_a_cached_step_follows_what_was_measured_of_plain_ones(words: str) -> None:
    result = plan(plan_settings(*words.split(), "cache.keep=none"), search=False)
    low, high = CACHED[words]
    rate = result["time"]["samples_per_s"] / (result["gpus"] * result["nodes"])
    assert low <= rate <= high
    assert result["time"]["plain_samples_per_s"] == pytest.approx(4 / 3 * result["time"]["samples_per_s"], rel=0.05)


@pytest.mark.parametrize("chip", ["h100-80g", "a100-80g", "rtx4090-24g", "v100-32g", "b200-180g", "mi300x-192g"])
def test_a_smaller_model_is_faster_and_no_chip_exceeds_what_was_measured_by_much(chip: str) -> None:
    """B/32 has 2.8 times fewer operations than B/16, and came out slower. 0.455 of an H100's peak: L/14, compiled."""
    gpu = HARDWARE[chip]
    rates = []
    for model, gflop in (("ViT-B-32", 14.78), ("ViT-B-16", 41.09), ("ViT-L-14", 175.33), ("ViT-H-14", 381.68)):
        _, low, high = step_time.plain_share(model, gpu, gflop * 1e9)
        assert 0.36 < low <= high <= 1.2 * 0.456
        rates.append((low / gflop, high / gflop))
    assert all(low > next_high for (low, _), (_, next_high) in pairwise(rates))


def test_a_step_of_small_chunks_takes_as_long_as_its_launches() -> None:
    """torch issues 2,929 operations for a B/32 with 32 pairs on each GPU (counted apart, bf16), in 5 to 8 us each."""
    few, many = (
        plan(plan_settings("model=vit-b32", f"batch={batch}", "hardware=h100-80g", "gpus=8"), search=False)["time"]
        for batch in ("256", "8k")
    )
    assert 2929 * 5e-6 < few["step_s"] == few["issued_s"] < 2929 * 8e-6
    assert few["range"][1] == few["samples_per_s"] == 256 / few["step_s"]
    assert many["issued_s"] < many["step_s"] / 3
    # One core decodes 560 pictures of 256 pixels in a second, 210 of 512 (docs/benchmarks/data.md).
    assert many["cores"][256] == pytest.approx(many["samples_per_s"] / 560)
    assert many["cores"][512] > 256, "more than a machine of eight H100s has"
