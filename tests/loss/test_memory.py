"""Memory that grows with the batch and not with its square.

Letters: N pairs, D feature width.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from clipscale.loss.api import contrastive_loss
from clipscale.loss.runtime import running_on
from clipscale.tools.plan.memory_tracker import DryRunRuntime, cuda_autocast, without_memory

# Prints by how many bytes the peak of a forward and a backward pass exceeds what the process holds before them. The
# peak is reset first (proc(5), clear_refs); glibc gives back what is freed, so the peak is what was held.
PEAK = """
import sys
import torch, torch.nn.functional as F
from clipscale import contrastive_loss
from open_clip.loss import ClipLoss

def held(what):
    line = next(x for x in open("/proc/self/status") if x.startswith(what))
    return 1024 * int(line.split()[1])

loss = ClipLoss() if sys.argv[1] == "peer" else contrastive_loss
for n in (64, 16384):  # the first for torch's allocations that happen once
    u, v = (F.normalize(torch.randn(n, 512), dim=1).requires_grad_() for _ in range(2))
    open("/proc/self/clear_refs", "w").write("5")
    before = held("VmRSS")
    loss(u, v, torch.tensor(14.3, requires_grad=True)).backward()
print(held("VmHWM") - before)
"""


def printed(program: str, *words: str, **variables: str) -> Any:
    """What a process of its own prints."""
    environment = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2400, env=environment)
    return json.loads(done.stdout)


@pytest.mark.timeout(3000)
@pytest.mark.slow  # five gigabytes of the peer's matrices
def test_extra_memory_at_16k_is_at_most_a_twentieth_of_clip_loss() -> None:
    """The extra memory includes the features' gradients."""
    given = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    ours, peer = (printed(PEAK, method, **given) for method in ("ours", "peer"))
    assert ours * 20 <= peer, f"{ours / 2**20:.0f} MiB against ClipLoss's {peer / 2**20:.0f} MiB"


@pytest.mark.parametrize(
    ("objective", "dtype", "bytes_each"),
    [("softmax", torch.bfloat16, 4), ("softmax", torch.float16, 4), ("sigmoid", torch.float16, 8)],
)
def test_a_million_pairs_take_memory_for_the_texts_sums_on_a_gpu(
    objective: str, dtype: torch.dtype, bytes_each: int
) -> None:
    """Half-precision features and their gradients do not count. Nothing is left afterwards, by the memory tracker.

    The sigmoid's gradients in float16 are float32 until the caller's factor is known.
    """
    n = 2**20
    width = 768
    with without_memory() as memory, cuda_autocast():
        u, v = (torch.empty(n, width, dtype=dtype).requires_grad_() for _ in range(2))
        scale, bias = (torch.tensor(x).requires_grad_() for x in (10.0, -10.0))
        memory.take_peak()
        before = memory.live
        grads = 2 * n * width * dtype.itemsize
        with running_on(DryRunRuntime(90)):
            contrastive_loss(u, v, scale, logit_bias=bias, objective=objective, check=False).backward()
        peak = memory.take_peak() - before - grads
        left = memory.live - before - grads
    assert peak <= bytes_each * n * width + 2**28, f"{peak / 2**30:.2f} GiB"
    assert left <= 2**12, f"{left} bytes remain"
