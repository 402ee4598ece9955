"""Decoding on the device runs on the CPU, and on a CUDA device if there is one."""

import pytest
import torch

from clipscale.data.loader import gpu_decode
from tests.support.device import DEVICE, on_device


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(gpu_decode, "require_gpu", lambda device: None)
    return torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=on_device, id="device")])
def device(request: pytest.FixtureRequest, cpu: torch.device) -> torch.device:
    return torch.device(request.param)
