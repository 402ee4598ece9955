"""The record of a step."""

import math
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from clipscale.run.step_records import StepRecords
from clipscale.run_folder.records import StepRecord, read_metrics
from clipscale.step.measurements import StepTimer
from clipscale.step.step_loss import StepScalars
from clipscale.step.train_step import StepResult
from tests.log.test_metrics import open_log


@pytest.mark.parametrize(
    ("loss", "norm", "is_skipped"), [(0.5, 1.0, False), (math.inf, 1.0, False), (0.5, math.nan, True)]
)
def test_a_step_is_skipped_exactly_when_its_gradient_norm_is_not_finite(
    loss: float, norm: float, is_skipped: bool, tmp_path: Path
) -> None:
    """The loss of a step with fp16 may be infinite while its gradients are finite: such a step is not skipped."""
    record = logged(tmp_path, StepScalars(loss, {}, norm))
    assert record["skipped"] == is_skipped
    assert record["grad_norm"] == (None if is_skipped else norm)


def test_a_clock_that_stands_still_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monotonic clock promises only that it never goes back: a virtual machine's may show the same time again."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    record = logged(tmp_path, StepScalars(0.5, {}, 1.0))
    assert record["samples_per_s"] > 0 and record["samples_per_s_wall"] > 0 and record["data_wait_frac"] == 0


def logged(folder: Path, scalars: StepScalars) -> StepRecord:
    """The record of a step with these scalars, from the log in the folder."""
    stream, flops = Mock(record=dict), Mock(utilisation=lambda *_: None)
    records = StepRecords(open_log(folder, total=1000), 1, flops, stream)
    timer = StepTimer(torch.device("cpu"))
    with timer("encode"):
        pass
    done = StepResult(scalars, wants_save=False, timer=timer, waited_s=0.0, texts_by_seq_len={8: 8}, statistics=None)
    records.add({"step": 1, "batch": 8}, done, torch.tensor(14.3))
    records.close()
    (record,) = read_metrics(folder / "metrics.jsonl")
    return record
