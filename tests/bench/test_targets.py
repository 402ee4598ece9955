"""The targets as lines, on rows that are made up: reached, missed, and not measured."""

from typing import Any

import pytest

from clipscale.bench import loss, step

Row = dict[str, Any]


def of_loss(rows: list[Row]) -> list[str]:
    return loss.targets({"rows": rows})


def of_step(rows: list[Row]) -> list[str]:
    return step.targets({"rows": rows})


def loss_row(method: str, n: int, seconds: float, fraction: float = 0.8, extra: int = 1 << 30, **more: Any) -> Row:
    figures = {"total_s": {"median": seconds}, "gemm_fraction": fraction, "extra_bytes": extra}
    where = {"device": "cuda", "ranks": 1, "n": n, "d": 768, "dtype": "bf16", "method": method, "status": "ok"}
    return where | figures | more


def test_the_loss_on_cuda_is_held_to_the_gemm_rate_to_inf_cl_and_to_a_bound_of_memory() -> None:
    rows = [
        loss_row("infcl", 32768, 1.0, fraction=0.1),  # smaller than the target is for
        loss_row("infcl", 65536, 0.05, fraction=0.831),
        loss_row("inf_cl", 65536, 0.45),
        loss_row("infcl", 1 << 20, 12.0, fraction=0.8),
        loss_row("inf_cl", 1 << 20, 0.0, status="not run"),
        loss_row("triton-panel-64M", 65536, 0.05, fraction=0.2),
    ]
    assert of_loss(rows) == [
        "reached: at least 80 % of the GEMM rate at 4 units (N >= 64k, D = 768, bf16): 64k x 768 bf16 83.1%, 1M x 768 bf16 80.0%",
        "reached: at least 8 times as fast as inf-cl (N >= 64k, D = 768, bf16): 64k x 768 bf16 9.00, 1M x 768 bf16 (inf_cl: not run)",
        "reached: at most 1.9 GiB of extra memory (N >= 1M): 1M x 768 bf16 1.00 GiB",
    ]
    rows[1] |= {"gemm_fraction": 0.799, "total_s": {"median": 0.06}}
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


def step_row(case: str, ratio: float | None = 1.0, **more: Any) -> Row:
    method, _, batch = case.partition("@")
    ratios = {"ratio": ratio and {"median": ratio}}
    return {"case": case, "method": method, "batch": int(batch), "status": "ok"} | ratios | more


def passes(encode: int, replay: int, batch: int) -> Row:
    features = 4096 * batch
    sizes = {"features_bytes": features, "mem_encode_bytes": encode + features, "mem_replay_bytes": replay}
    return {"parts": sizes | {"mem_loss_bytes": 8192 * batch}}


STEP = [
    step_row("cache@32768", 1.22, to_open_clip={"median": 0.97}, **passes(300, 1000, 32768)),
    # open_clip's plain step does not reach this batch.
    step_row("cache@1048576", 1.22, **passes(300, 1010, 1 << 20)),
    step_row("frozen@32768", 1.04),
]


def test_the_step_is_held_to_plain_to_open_clip_and_to_flat_memory() -> None:
    lines = of_step(STEP)
    assert lines == [
        "reached: the cache in at most 1.25 times plain's time: cache@32768 1.22, cache@1048576 1.22",
        "reached: with a frozen image tower, in at most 1.05 times plain's: frozen@32768 1.04",
        "reached: exact and cached in at most the time of open_clip's plain step: cache@32768 0.97, cache@1048576 has no such figure",
        "reached: memory flat within 2 % from 32k to 1M pairs, the loss's linear part aside: cache: encode, less features, 0.0%, "
        "cache: replay 1.0%",
    ]


@pytest.mark.parametrize(
    ("line", "row", "change"),
    [
        (0, 0, {"ratio": {"median": 1.26}}),
        (0, 0, {"status": "failed"}),
        (1, 2, {"ratio": {"median": 1.06}}),
        (2, 0, {"to_open_clip": {"median": 1.01}}),
        (3, 1, passes(300, 1030, 1 << 20)),
        (3, 1, {"status": "out of memory", "parts": {}}),
    ],
)
def test_one_row_that_misses_a_bar_is_enough(line: int, row: int, change: Row) -> None:
    rows = [old | change if number == row else old for number, old in enumerate(STEP)]
    assert of_step(rows)[line].startswith("missed"), of_step(rows)[line]


def test_what_a_step_lacks_is_not_measured() -> None:
    lacking = of_step([step_row("cache@32768", None)])
    assert [line.split(":")[0] for line in lacking] == ["not measured"] * 4, lacking
    assert lacking[0].endswith("cache@32768 has no such figure")
    short = of_step([STEP[0], STEP[1] | {"batch": 65536}])[-1]
    assert short.startswith("not measured") and short.endswith("cache was measured from 32k to 64k only"), short
