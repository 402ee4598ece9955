"""The record of a step."""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from clipscale.log.records import read_metrics
from clipscale.log.step_records import StepRecords
from clipscale.step.timer import StepTimer
from clipscale.step.train_step import StepNumbers, StepResult
from tests.log.test_metrics import open_log


def test_a_clock_that_stands_still_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monotonic clock promises only that it never goes back: a virtual machine's may show the same time again."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    stream, flops = Mock(record=dict), Mock(utilisation=lambda *_: None)
    records = StepRecords(open_log(tmp_path), 1, flops, stream)
    timer = StepTimer(torch.device("cpu"))
    with timer("encode"):
        pass
    done = StepResult(StepNumbers(0.5, {}, 1.0), Mock(), timer, waited_s=0.0, widths={8: 8}, statistics=None)
    records.add({"step": 1, "batch": 8}, done, torch.tensor(14.3))
    records.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["samples_per_s"] > 0 and record["samples_per_s_wall"] > 0 and record["data_wait_frac"] == 0
