"""The targets as lines, on rows that are made up: reached, missed, and not measured."""

from typing import Any

import pytest

from clipscale.bench import loss, step
from clipscale.bench.fit import within_a_tenth

Row = dict[str, Any]


def of_loss(rows: list[Row]) -> list[str]:
    return loss.targets({"rows": rows})


def of_step(rows: list[Row], model: str, device: str) -> list[str]:
    return step.targets({"rows": rows, "settings": {"model": model}, "device": device})


def loss_row(method: str, n: int, seconds: float, fraction: float = 0.8, extra: int = 1 << 30, **more: Any) -> Row:
    figures = {"total_s": {"median": seconds}, "gemm_fraction": fraction, "extra_bytes": extra}
    where = {"device": "cuda", "ranks": 1, "n": n, "d": 768, "dtype": "bf16", "method": method, "status": "ok"}
    return where | figures | more


def test_the_loss_on_cuda_is_held_to_the_gemm_rate_to_inf_cl_and_to_two_gibibytes() -> None:
    rows = [
        loss_row("infcl", 32768, 1.0, fraction=0.1),  # smaller than the target is for
        loss_row("infcl", 65536, 0.05, fraction=0.771),
        loss_row("inf_cl", 65536, 0.45),
        loss_row("infcl", 1 << 20, 12.0, fraction=0.76),
        loss_row("inf_cl", 1 << 20, 0.0, status="not run"),
        loss_row("triton-panel-64M", 65536, 0.05, fraction=0.2),
    ]
    assert of_loss(rows) == [
        "reached: at least 75 % of the GEMM rate at 4 units (N >= 64k, D = 768, bf16): 64k x 768 bf16 77.1%, 1M x 768 bf16 76.0%",
        "reached: at least 8 times as fast as inf-cl (N >= 64k, D = 768, bf16): 64k x 768 bf16 9.00, 1M x 768 bf16 (inf_cl: not run)",
        "reached: at most 2 GiB of extra memory (N >= 1M): 1M x 768 bf16 1.00 GiB",
    ]
    rows[1] |= {"gemm_fraction": 0.749, "total_s": {"median": 0.06}}
    rows[3] |= {"status": "out of memory"}
    assert [line.split(":")[0] for line in of_loss(rows)] == ["missed"] * 3
    assert of_loss(rows)[2].endswith("1M x 768 bf16 out of memory")
    lacking = of_loss([row for row in rows if row["n"] == 32768])
    assert [line.split(":")[0] for line in lacking] == ["not measured"] * 3
    assert lacking[0].endswith("there are no such rows")


def test_the_loss_on_a_cpu_is_held_to_clip_loss() -> None:
    where = {"device": "cpu", "d": 512, "dtype": "fp32"}
    ours, peer = loss_row("infcl", 16384, 2.0, extra=2 << 20), loss_row("open_clip", 16384, 3.2, extra=44 << 20)
    fast, small = of_loss([ours | where, peer | where])
    assert fast.startswith("reached") and fast.endswith("16k x 512 fp32 1.60"), fast
    assert small.startswith("reached") and small.endswith("16k x 512 fp32 1/22"), small
    slow = of_loss([ours | where | {"total_s": {"median": 2.2}, "extra_bytes": 3 << 20}, peer | where])
    assert [line.split(":")[0] for line in slow] == ["missed", "missed"]
    alone = of_loss([ours | where])
    assert [line.split(":")[0] for line in alone] == ["not measured"] * 2 and "(open_clip: not run)" in alone[0]
    assert of_loss([ours | where | {"ranks": 4}]) == [], "the targets are of one process"


def step_row(case: str, rate: float, ratio: float | None = 1.0, **more: Any) -> Row:
    method, _, batch = case.partition("@")
    figures = {"samples_per_s": rate, "ratio": ratio and {"median": ratio}}
    return {"case": case, "method": method, "batch": int(batch), "status": "ok", "mfu": 0.4} | figures | more


def passes(encode: int, replay: int, batch: int) -> Row:
    features = 4096 * batch
    sizes = {"features_bytes": features, "mem_encode_bytes": encode + features, "mem_replay_bytes": replay}
    return {"parts": sizes | {"mem_loss_bytes": 8192 * batch}}


STEP = [
    step_row("plain@1024", 1000.0),
    step_row("open_clip-plain@1024", 900.0),
    step_row("cache@32768", 820.0, 1.22, to_open_clip={"median": 0.97}, **passes(300, 1000, 32768)),
    # open_clip's plain step does not reach this batch.
    step_row("cache@1048576", 820.0, 1.22, **passes(300, 1010, 1 << 20)),
    step_row("frozen@32768", 100.0, 1.04),
    step_row("open_clip@32768", 800.0),
]


def test_the_step_is_held_to_utilisation_to_plain_to_open_clip_and_to_flat_memory() -> None:
    lines = of_step(STEP, "vit-b16", "cuda")
    assert lines == [
        "reached: plain at 35% MFU at least: plain@1024 40.0%",
        "reached: the cache in at most 1.25 times plain's time: cache@32768 1.22, cache@1048576 1.22",
        "reached: with a frozen image tower, in at most 1.05 times plain's: frozen@32768 1.04",
        "reached: exact and cached in at most the time of open_clip's plain step: cache@32768 0.97, cache@1048576 has no such figure",
        "reached: faster than open_clip in every row: plain@1024 to open_clip-plain@1024 1.11, "
        "cache@32768 to open_clip@32768 1.02, cache@1048576 to open_clip@32768 1.02",
        "reached: memory flat within 2 % from 32k to 1M pairs, the loss's linear part aside: cache: encode, less features, 0.0%, "
        "cache: replay 1.0%",
    ]
    assert of_step(STEP, "vit-l14", "cuda")[0].startswith("missed: plain at 45% MFU")
    assert len(of_step(STEP, "vit-b32", "cuda")) == len(of_step(STEP, "vit-l14", "cpu")) == 5, "no target for that"


@pytest.mark.parametrize(
    ("line", "row", "change"),
    [
        (1, 2, {"ratio": {"median": 1.26}}),
        (2, 4, {"ratio": {"median": 1.06}}),
        (3, 2, {"to_open_clip": {"median": 1.01}}),
        (4, 2, {"samples_per_s": 799.0}),
        (4, 0, {"status": "failed"}),
        (5, 3, passes(300, 1030, 1 << 20)),
        (5, 3, {"status": "out of memory", "parts": {}}),
    ],
)
def test_one_row_that_misses_a_bar_is_enough(line: int, row: int, change: Row) -> None:
    rows = [old | change if number == row else old for number, old in enumerate(STEP)]
    assert of_step(rows, "vit-b16", "cuda")[line].startswith("missed"), of_step(rows, "vit-b16", "cuda")[line]


def test_what_a_step_lacks_is_not_measured() -> None:
    lacking = of_step([step_row("cache@32768", 1.0, None, mfu=None)], "vit-b16", "cuda")
    assert [line.split(":")[0] for line in lacking] == ["not measured"] * 6, lacking
    assert lacking[1].endswith("cache@32768 has no such figure")
    short = of_step([STEP[2], STEP[3] | {"batch": 65536}], "vit-b16", "cuda")[-1]
    assert short.startswith("not measured") and short.endswith("cache was measured from 32k to 64k only"), short


def run_row(run: str, **ratios: float | None) -> Row:
    return {"run": run, "status": "ok", "predicted": {"compared": {name: {"ratio": r} for name, r in ratios.items()}}}


def test_the_plan_is_held_to_a_tenth() -> None:
    runs = [run_row("a", encode=0.97, peak=1.01), run_row("b", encode=1.0, loss=1.099, host=2.0)]
    (line,) = within_a_tenth({"rows": runs})
    assert line == "reached: memory predicted within 10% of measured in every phase: a (encode) 3.0%, b (loss) 9.9%"
    assert within_a_tenth({"rows": [*runs, run_row("c", replay=0.89)]})[0].startswith("missed")
    assert within_a_tenth({"rows": [*runs, {"run": "c", "status": "failed"}]})[0].startswith("missed")
    assert within_a_tenth({"rows": [run_row("c", encode=None, host=1.0)]})[0].startswith("not measured"), (
        "on a CPU the host alone is"
    )
    assert within_a_tenth({"rows": []})[0].endswith("there are no such rows")
