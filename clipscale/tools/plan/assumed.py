"""The figures of assumed.yaml: what a plan assumes or takes from documents, because a dry run cannot see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipscale.common import files


@dataclass(frozen=True)
class Assumptions:
    """The entries of assumed.yaml, where each has its meaning and its source."""

    context_bytes: int
    nccl_bytes: int
    workspace_bytes: int
    hopper_workspace_bytes: int
    reserved_share: float
    auto_chunk: int
    largest_batch: int
    linear_from_samples: int
    process_bytes: int
    cuda_process_bytes: int
    loader_bytes: int
    worker_bytes: int
    picture_bytes: int
    caption_tokens: int
    # Picture side in pixels -> pictures a second.
    decoded_per_s: Mapping[int, float]
    # Names of torch's operations.
    float32_on_cuda: Sequence[str]
    # What a user sets -> the settings that it changes.
    remedies: Mapping[str, Mapping[str, object]]
    # Lines of a plan.
    notes: Sequence[str]


ASSUMED = Assumptions(**files.read_yaml(Path(__file__).with_name("assumed.yaml")))
