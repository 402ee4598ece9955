"""What steps take on the CPU, by torch's own allocator: its profiler sees every allocation, those inside kernels too."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from clipscale.config import TrainConfig
from clipscale.distributed import World
from clipscale.learner import Learner
from clipscale.plan.rehearsal import CPU, Rehearsal, Step, rehearsed
from clipscale.transfer import DeviceRows

PHASES = ("encode", "loss", "replay", "optim")


def phase_peaks(step: Step) -> dict[str, int]:
    """By phase instead of by stage."""
    return {phase: max(v for k, v in step.peak.items() if k.split()[0] == phase) for phase in PHASES}


def predicted(config: TrainConfig, ranks: int = 1, **budget: float) -> Step:
    """Of the second step of `config` on a CPU."""
    chunk = int(config.cache.chunk)
    with rehearsed(config, ranks, None) as rehearsal:
        return rehearsal.step((chunk, chunk), config.batch // ranks)


def measured(config: TrainConfig, folder: Path, ranks: int = 1, rank: int = 0, keep: float = 0) -> Step:
    """Of the second step of `config`, run on the CPU. Counted from before the model was built."""
    steps = 2
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        learner = Learner(config, World(rank, ranks, rank, CPU), folder, None)
        learner.cache.memory.budget = keep
        local, model = config.batch // ranks, learner.model
        pixels = lambda n: torch.zeros(n, 3, model.image_size, model.image_size, dtype=torch.uint8)  # noqa: E731
        tokens = lambda n: torch.ones(n, model.context_length, dtype=torch.int32)  # noqa: E731
        for number in range(steps):
            last = number == steps - 1
            mark: Callable[[str], record_function | nullcontext[None]] = (
                record_function if last else lambda _: nullcontext()
            )
            learner.optimizer.zero_grad()
            images, texts = (
                DeviceRows(lambda i, j, make=make: make(j - i), local, CPU, resident=config.offload == "none")
                for make in (pixels, tokens)
            )
            with mark("encode"):
                features = learner.cache.encode(images, texts)
            with mark("loss"):
                learner.cache.backward(learner.loss(*features))
                del features
            with mark("replay"):
                learner.cache.replay()
            with mark("optim"):
                learner.gradient_norm()
                learner.update()
    result = profiler.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in result.events() if e.name() == "[memory]")
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in result.events() if e.name() in PHASES}
    step = Step({}, {})
    for phase, (start, end) in spans.items():
        live = 0
        for at, change in changes:
            if at > end:
                break
            if at <= start:
                step.before[phase] = step.peak[phase] = live + change
            live += change
            if at > start:
                step.peak[phase] = max(step.peak[phase], live)
    return step


__all__ = ["PHASES", "Rehearsal", "measured", "phase_peaks", "predicted"]
