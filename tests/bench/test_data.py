"""The data benchmark: what it measures, and that its figures are of what it says."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from clipscale.bench.data import CAPTION, feeding, main
from clipscale.bench.data_work import ON_CPU, OWN_TOKENS, PEER, WORDS, DataWorker, photograph, with_ratios
from clipscale.common.errors import UserError
from clipscale.config.presets import conf_dir
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import DataBenchSettings
from clipscale.models.flops import forward_flops
from tests.bench.measuring import in_process

SMALL = {"image_size": 32, "pictures": 2, "repeats": 1, "workers": 1, "batch": 16}


@pytest.fixture(autouse=True, scope="module")
def here() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        in_process(DataWorker, patch)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, here: None) -> dict:
    out = tmp_path_factory.mktemp("bench")
    main(DataBenchSettings(sizes="40,80", stream="40", device="cpu", out=str(out), **SMALL))
    assert (out / "data.png").stat().st_size > 10_000
    assert "| decode | 40 | decode=exact |" in (out / "data.md").read_text()
    return json.loads((out / "data.json").read_text())


def test_every_method_is_measured_at_every_size(record: dict) -> None:
    methods = [*(f"decode={name}" for name in ON_CPU), PEER]
    expected = []
    for side in (40, 80):
        expected += [("decode", side, method) for method in methods]
    expected += [("tokens", WORDS, method) for method in (OWN_TOKENS, PEER)]
    expected += [("stream", 40, method) for method in methods]
    assert [(r["kind"], r["side"], r["method"]) for r in record["rows"]] == expected
    for row in record["rows"]:
        rate = row["per_s"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"] and len(rate["all"]) == 1, row
        assert row["method"] != PEER or row["ratio"] == 1, row
    off = {row["side"]: row["difference"] for row in record["rows"] if "difference" in row}
    assert off[40] == 0 < off[80] < 10, f"{off}: 40 pixels cannot be halved for 32, 80 can"


def test_cores_that_feed_a_gpu_are_those_that_give_what_it_takes() -> None:
    """A core that needs 1 ms a picture and 0.25 ms a caption gives 800 samples a second."""
    rates = {
        ("decode", 256, "decode=exact"): 1000,
        ("decode", 512, "decode=exact"): 9,
        ("tokens", 12, "clipscale"): 4000,
    }
    rows = [{"kind": k, "side": s, "method": m, "per_s": {"median": x}} for (k, s, m), x in rates.items()]
    record = {"rows": rows, "settings": {"model": "tiny", "stream": "256"}}
    values = yaml.safe_load((conf_dir() / "model/tiny.yaml").read_text())
    takes = 0.4 * 312e12 / (4 * sum(forward_flops(ModelConfig(**values), CAPTION)))
    assert feeding(record)[0] == (
        f"one a100-80g takes {takes:,.0f} samples/s of tiny (predicted, 40% of its peak): "
        f"{math.ceil(takes / 800)} cores for 256-pixel JPEGs with decode=exact"
    )
    assert feeding(record | {"rows": rows[:2]}) == [], "without the tokenizer's rate nothing is said"


@pytest.mark.slow
def test_what_a_record_holds_is_not_measured_again(tmp_path: Path) -> None:
    small = SMALL | {"device": "cpu", "out": str(tmp_path)}
    main(DataBenchSettings(sizes="80", stream="", **small | {"repeats": 2}))
    (before, *_) = main(DataBenchSettings(sizes="", stream="", resume=True, **small | {"repeats": 2}))
    rows = main(DataBenchSettings(sizes="40,80", stream="", resume=True, **small))
    assert [(r["kind"], r["side"]) for r in rows] == [("decode", 40)] * 3 + [("decode", 80)] * 3 + [
        ("tokens", WORDS), ("tokens", WORDS),
    ]  # fmt: skip
    assert rows[3] == before and [len(r["per_s"]["all"]) for r in rows] == [1, 1, 1, 2, 2, 2, 2, 2]


def test_pixels_cross_as_bytes_and_the_peers_as_floats(record: dict) -> None:
    rows = [r for r in record["rows"] if r["kind"] == "stream"]
    own, peer = (next(r for r in rows if (r["method"] == PEER) == theirs) for theirs in (False, True))
    assert own["bytes"] == 3 * 32 * 32 + 77 * 4, own["bytes"]
    assert peer["bytes"] == 4 * 3 * 32 * 32 + 77 * 8, peer["bytes"]


def test_the_ratio_is_taken_round_by_round() -> None:
    rows = with_ratios({"a": [2.0, 30.0, 40.0], PEER: [1.0, 10.0, 20.0]})
    assert [row["ratio"] for row in rows] == [2.0, 1.0]


def test_a_photograph_is_the_same_every_time_and_compresses_like_one() -> None:
    data = photograph(256, 1)
    assert data == photograph(256, 1) != photograph(256, 2)
    assert Image.open(io.BytesIO(data)).size == (256, 256)
    bits = 8 * len(data) / 256**2
    assert 1 < bits < 6, f"{bits:.2f} bits a pixel; photographs at quality 90 take about 2 to 4"


def test_a_size_that_is_no_count_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sizes=25x"):
        main(DataBenchSettings(sizes="25x", out=str(tmp_path)))
