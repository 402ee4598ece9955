"""The variables that torch reads when it is loaded. The workers of a run inherit them."""

import os


def prepare_torch() -> None:
    """Set variables that torch reads when it is loaded, unless they are set.

    OpenMP's idle threads sleep: threads that spin keep the cores that data workers and other ranks need. The segments
    of a GPU's allocator grow: chunks of many widths leave gaps in segments of fixed sizes.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if not any(name.startswith(("OMP_", "GOMP_", "KMP_")) for name in os.environ):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = "0"
