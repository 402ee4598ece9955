"""The step benchmark: every method computes the same gradient, and records become tables and pictures."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from torch import Tensor

from clipscale.bench import present
from clipscale.bench.harness import KEEPING_MALLOC, RETURNING_MALLOC, Job, measure
from clipscale.bench.step import METHODS, StepPart, chosen, plan
from clipscale.bench.step_work import Name, StepVariant, StepVariants, StepWorker, caption_sizes
from clipscale.bench.worker import Meter
from clipscale.cli import main as cli
from clipscale.common.errors import UserError
from clipscale.config.tools import StepBenchSettings
from clipscale.data.loader.host_batch import Arena

ABOUT = {"model": "tiny", "chunk": 4, "precision": "fp32"}
JOB = Job(ABOUT, "cpu")


@pytest.fixture(scope="module")
def work() -> StepWorker:
    return StepWorker(JOB)


def step(variant: StepVariant, size: int) -> None:
    variant.step(variant.inputs(size), Meter(torch.device("cpu")))


def gradients(work: StepWorker, name: str) -> dict[str, Tensor]:
    work.release()
    step(work.variant(name), 12)
    kind = Name.of(name).kind
    owner = work.variants.peer if "open_clip" in name else work.variants.model(kind)
    found = {k: p.grad for k, p in owner.named_parameters() if p.grad is not None}
    # open_clip's model has no wrappers around its encoders
    return {k.replace("image.encoder.", "visual.").replace("text.encoder.", "text."): g for k, g in found.items()}


@pytest.mark.parametrize(
    "name",
    ["cache", "keep-50", "frozen", "unsorted", "neither"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("keep-100", "keep-1G", "frozen-keep-100", "unlean-keep-50")
    ],
)
def test_every_method_leaves_the_gradient_of_plain(work: StepWorker, name: str) -> None:
    wanted = gradients(work, "frozen-plain" if name.startswith("frozen") else "plain")
    found = gradients(work, name)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        error = ((found[key] - gradient).norm() / gradient.norm().clamp_min(1e-12)).item()
        assert error < 1e-3, f"{name}, {key}: relative error {error:.1e}"


@pytest.mark.timeout(1500)  # compiling
@pytest.mark.parametrize("name", ["open_clip", pytest.param("compiled-open_clip", marks=pytest.mark.slow)])
def test_open_clips_loop_does_the_same_work(work: StepWorker, name: str) -> None:
    """Equal gradients but for the scale's, which its loop counts once for each chunk."""
    wanted, found = gradients(work, "plain"), gradients(work, name)
    assert found.keys() == wanted.keys()
    norms = [sum(g.square().sum() for k, g in grads.items() if k != "logit_scale").sqrt() for grads in (wanted, found)]
    assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-3)
    assert found["logit_scale"].item() == pytest.approx(3 * wanted["logit_scale"].item(), rel=1e-3)


def test_kept_graphs_save_second_passes(work: StepWorker) -> None:
    calls: list[int] = []
    first = (
        work.variants.model().image.encoder.transformer.resblocks[0].mlp.c_fc
    )  # a checkpointed graph computes it twice
    hook = first.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for name in ("cache", "keep-50", "keep-100"):
        step(work.variant(name), 12)  # a first step measures
        calls.clear()
        step(work.variant(name), 12)
        counts.append(len(calls))
    hook.remove()
    assert counts[0] == 6 and counts[0] > counts[1] > counts[2] == 3, counts


def test_captions_have_the_lengths_that_are_stated_in_every_batch() -> None:
    sizes = torch.tensor(caption_sizes(4096, 77)).double()
    assert sizes.mean().item() == pytest.approx(20, rel=0.02)
    assert sizes.quantile(0.99).item() == pytest.approx(64, rel=0.03)
    assert (sizes == 77).double().mean().item() == pytest.approx(0.004, rel=0.2)
    assert all(batch.mean().item() == pytest.approx(20, rel=0.1) for batch in sizes.split(64))
    assert max(caption_sizes(64, 28)) == 28


def test_a_batch_beyond_the_pool_repeats_its_samples(work: StepWorker) -> None:
    """4 chunks of distinct samples serve any batch, however a method takes them."""
    (rows, _), (whole, _) = work.variants.rows(23), work.variants.on_device(23)
    chunks = torch.cat([rows.chunk(i, min(i + 4, 23)) for i in range(0, 23, 4)])
    assert torch.equal(chunks, whole) and torch.equal(whole[:7], whole[16:])
    inputs = work.variants.normalised(24, whole=False)
    assert [len(pixels) for pixels, _ in inputs] == [4] * 6 and inputs[4] is inputs[0]
    assert [len(pixels) for pixels, _ in work.variants.normalised(23, whole=True)] == [23]


def test_a_largest_batch_that_does_not_fit_beside_the_others_is_an_eighth_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, sizes = StepWorker(JOB), list[int]()

    def time(worker: StepWorker, case: str) -> None:
        sizes.append(worker.record(case)["size"])
        if sizes[-1] > 50:
            raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr("clipscale.bench.worker.Worker.time", time)
    work.record("plain@max")["size"] = work.record("plain@64")["size"] = 64
    work.time("plain@max")
    assert sizes == [64, 56, 49]
    with pytest.raises(torch.OutOfMemoryError):
        work.time("plain@64")


def test_time_is_recorded_as_it_goes(work: StepWorker) -> None:
    answers: list[dict[str, Any]] = []
    built, work = work.variants, StepWorker(replace(JOB, timed=["cache@4", "plain@8"], repeats=2), 0, answers.append)
    work.variants = built
    found = work.work()["cases"]
    assert answers[-1]["cases"] == found and answers[-1]["complete"] and not answers[0]["complete"]
    assert found["cache@4"]["status"] == "ok" and len(found["cache@4"]["steps"]) == 2
    assert set(found["cache@4"]["parts"]) == {"encode_s", "loss_s", "replay_s", "features_bytes"}
    assert found["plain@8"]["size"] == 8 and found["plain@8"]["flops"] > 0


def test_the_largest_batch_is_found_between_one_that_fits_and_one_that_does_not(
    work: StepWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for 1,500 samples: doubling stops at 2,048, and the gap above 1,024 is halved to an eighth of that."""
    monkeypatch.setattr(work, "fits", lambda variant, size: size <= 1500)
    assert work.largest("plain@max") == work.largest("compiled-plain@max") == 1408
    assert list(work.found.pop("plain@max")["tried"]) == [4 << n for n in range(10)] + [1536, 1280, 1408]
    monkeypatch.setattr(work, "fits", lambda variant, size: False)
    work.attempt("plain@max", lambda: work.ready("plain@max"))
    assert work.found.pop("plain@max")["status"] == "out of memory"


def test_samples_lie_in_a_training_batchs_arena_which_is_pinned_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied to the device is a view of the arena's own block, as in training with offload=host."""
    variants, pinned = StepVariants("tiny", 4, "fp32", "cpu"), []
    monkeypatch.setattr(Arena, "pin", lambda arena: pinned.append(arena))
    variants.model()
    variants.device = torch.device("cuda")
    _ = variants.pool
    variants.device = torch.device("cpu")
    arena = variants.arena
    assert pinned == [arena] and variants.pinned is False, "pinned is what torch reports"
    (rows, tokens), (slot,) = variants.rows(1 << 20), arena.slots
    row = rows.chunk(1 << 19, (1 << 19) + 4)
    assert row.data_ptr() == slot["rows"].ctypes.data and row.shape == (4, *slot["rows"].shape[1:])
    assert tokens.chunk(4, 8).data_ptr() == slot["tokens"][4:].ctypes.data
    assert slot["rows"].min() == 0 and slot["rows"].max() == 255 and 127 < slot["rows"].mean() < 128


@pytest.mark.slow
def test_memory_itself_bounds_the_largest_batch() -> None:
    """In 600 MB beyond what torch takes, a process finds a batch that fits and one that does not."""
    job = Job(
        ABOUT | {"chunk": 32}, "cpu", timed=["plain@max"], repeats=1, memory=6 * 10**8, variables=RETURNING_MALLOC
    )
    (found,) = measure("clipscale.bench.step_work:StepWorker", job)
    record = found["cases"]["plain@max"]
    assert record["status"] == "ok" and "out of memory" in record["tried"].values(), record
    assert record["size"] >= 64 and len(record["steps"]) == 1


def steps(seconds: list[float]) -> list[dict[str, float]]:
    return [{"step": one} for one in seconds]


def by_hand() -> dict[str, Any]:
    settings = StepBenchSettings(methods="cache,frozen", batch=8, chunk=4, memory="4,8", device="cpu")
    part = plan(settings)
    names = ["plain", "frozen-plain", "cache", "frozen"]
    assert part.cases == [f"{name}@8" for name in names]
    ok = {"status": "ok", "steps": [], "memory": {"4": 1 << 20, "8": 3 << 20}}
    answers = [{"cases": {name: dict(ok)}} for name in names]
    answers[3]["cases"]["frozen"] |= {"status": "out of memory", "reason": "no memory", "traceback": ""}
    times = {"plain": [1.0, 2.0, 1.0], "frozen-plain": [0.5, 0.5, 0.5], "cache": [1.3, 2.8, 1.2], "frozen": []}
    timed = {"status": "ok", "size": 8, "mfu": 0.5}
    answers.append({"cases": {f"{name}@8": timed | {"steps": steps(seconds)} for name, seconds in times.items()}})
    facts = {"gpus": [], "cpu": "a processor", "versions": {"torch": "2"}}
    shown = {"batch": 8, "chunk": 4, "model": "tiny", "precision": "fp32", "memory": "4,8"}
    return (
        {"benchmark": "step", "device": "cpu", "settings": shown, "machine": facts, "methods": METHODS}
        | part.found([[answer] for answer in answers])
        | {"threads": 2}
    )


def test_ratios_are_taken_within_a_round() -> None:
    rows = {row["method"]: row for row in by_hand()["rows"]}
    assert rows["cache"]["ratio"]["median"] == pytest.approx(1.3)  # of 1.3, 1.4 and 1.2
    assert rows["cache"]["samples_per_s"] == pytest.approx(8 / 1.3)
    assert rows["frozen-plain"]["ratio"]["median"] == 1.0, "compared with itself"
    assert rows["frozen"]["status"] == "out of memory"
    assert rows["cache"]["peak_bytes"] == 3 << 20


def test_the_table_and_the_picture_show_every_method(tmp_path: Path) -> None:
    path, printed = tmp_path / "x.json", io.StringIO()
    present.show(by_hand(), path, Console(file=printed, width=120))
    for word in ("plain", "cache", "frozen", "out of memory", "1.30", "50.0%"):
        assert word in printed.getvalue(), f"no {word} in\n{printed.getvalue()}"
    assert imread(tmp_path / "x.png").shape[1] > 1000
    figure = present.draw(by_hand(), tmp_path / "x.png")
    assert len(figure.axes[1].get_lines()) == 4, "one curve of memory for each method with several batches"


def test_of_several_batches_a_method_is_compared_with_plain_at_the_same_or_the_largest() -> None:
    part = StepPart(JOB, ["plain@8", "cache@8", "cache@64", "plain@max"], [])
    times = {"plain@8": (8, [1.0]), "cache@8": (8, [1.5]), "cache@64": (64, [8.0]), "plain@max": (16, [1.6])}
    answers = [{"cases": {c: {"status": "ok", "size": b, "steps": steps(s)} for c, (b, s) in times.items()}}]
    rows = {row["case"]: row for row in part.found([answers])["rows"]}
    assert rows["cache@8"]["ratio"]["median"] == pytest.approx(1.5)
    assert rows["cache@64"]["ratio"]["median"] == pytest.approx((8 / 64) / (1.6 / 16))
    assert rows["plain@max"]["batch"] == 16 and rows["cache@64"]["samples_per_s"] == 8
    unfinished = part.found([[]])["rows"]
    assert [row["status"] for row in unfinished] == ["not run"] * 4, "no case goes missing"


def test_memory_is_measured_in_processes_apart_and_time_in_one() -> None:
    settings = StepBenchSettings(methods="cache,keep-30", batch=8, chunk=4, memory="4,16", device="cpu")
    *apart, last = plan(settings).jobs([])
    assert [job.probed for job in apart] == [
        [("plain", 4), ("plain", 8), ("plain", 16)],
        [("cache", 4), ("cache", 8), ("cache", 16)],
        [("keep-30", 8)],
    ]
    assert last.timed == ["plain@8", "cache@8", "keep-30@8"] and not last.probed
    (only,) = plan(replace(settings, memory="", methods="plain@max,cache@16,open_clip@8")).jobs([])
    assert only.timed == ["plain@max", "cache@16", "open_clip@8"], "no memory asked for"


def test_auto_leaves_open_clip_out_where_its_chunks_would_be_ragged() -> None:
    assert "open_clip@8" in chosen("auto", 8, 4)
    assert [case for case in chosen("auto", 9, 4) if "open_clip" in case] == ["open_clip-plain@9"]


def test_a_method_brings_what_it_is_compared_with_unless_that_is_named() -> None:
    assert chosen("compiled@16,keep-2G", 8, 4) == ["compiled-plain@8", "plain@8", "compiled@16", "keep-2G@8"]
    assert chosen("plain@max,cache@32k", 8, 4) == ["plain@max", "cache@32768"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "vit-b61"}, "model=vit-b61: no such preset; did you mean 'vit-b16'"),
        ({"chunk": 1024}, "chunk=1024: a batch=512 has no chunk that large"),
        ({"memory": "0"}, "memory=0: must be at least 1"),
        ({"methods": "keep-0"}, "methods=keep-0: unknown"),
        ({"methods": "frozen-open_clip"}, "methods=frozen-open_clip: unknown"),
        ({"methods": "compiled-open_clip@9", "chunk": 4}, "wants equal chunks"),
        ({"methods": "cache@max"}, "methods=cache@max: only what holds a whole batch's graph has a largest batch"),
        ({"methods": "open_clip@9", "chunk": 4}, "wants equal chunks"),
        ({"methods": ""}, "methods is empty"),
        ({"methods": "open_clip", "chunk": 100}, "wants equal chunks"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(StepBenchSettings(**{"device": "cpu"} | settings))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_whole_verb(tmp_path: Path) -> None:
    """Memory of plain grows with the batch, that of the cache does not; the record says what it ran on."""
    words = ["batch=256", "chunk=32", "memory=64,256", "methods=cache,open_clip", "repeats=2", "device=cpu"]
    assert cli.main(["bench", "step", *words, f"out={tmp_path}"]) == 0
    record = json.loads((tmp_path / "step-cpu.json").read_text())
    assert record["machine"]["command"].startswith("clipscale bench step batch=256")
    rows = {row["method"]: row for row in record["rows"]}
    assert all(row["status"] == "ok" for row in rows.values())
    assert rows["plain"]["memory"]["256"] > 2 * rows["plain"]["memory"]["64"]
    assert rows["cache"]["memory"]["256"] < 0.5 * rows["plain"]["memory"]["256"]
    assert (tmp_path / "step-cpu.png").stat().st_size > 10_000


def test_the_command_line_measures_with_its_settings_and_keeps_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Job] = []

    def answer(target: str, job: Job, on_answer: Any) -> list[dict[str, Any]]:
        measured.append(job)
        timed = {case: {"status": "ok", "size": 8, "steps": steps([0.5, 1.0]), "memory": {}} for case in job.timed}
        return [{"cases": timed, "threads": 1, "pinned": None, "complete": True}]

    monkeypatch.setattr("clipscale.bench.record.measure", answer)
    words = ["batch=8", "chunk=4", "memory=", "methods=cache", "repeats=2", "device=cpu", f"out={tmp_path}"]
    assert cli.main(["bench", "step", *words]) == 0
    assert measured == [replace(JOB, timed=["plain@8", "cache@8"], repeats=2, variables=KEEPING_MALLOC)]
    record = json.loads((tmp_path / "step-cpu.json").read_text())
    assert [row["samples_per_s"] for row in record["rows"]] == [8 / 0.75] * 2
    assert all(row["commit"] == record["machine"]["commit"] and row["code"] for row in record["rows"])
    assert "| cache | 8 | 11 |" in (tmp_path / "step-cpu.md").read_text()
