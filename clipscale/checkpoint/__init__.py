"""Checkpoints of a run: sharded, written in the background, and verified before they are used.

A checkpoint is a folder. `saving.py` writes it, `loading.py` reads it, and `format.py` is what both know:

    step_00001000/__0_0.distcp, ...   tensors, one file for each rank that wrote (torch.distributed.checkpoint)
    step_00001000/.metadata           which tensor is where
    step_00001000/meta.json           everything else; and the size and the CRC-32 of each file above

It holds a nested dictionary; `state.py` lists its entries. A tensor is stored under its path, such as
model/logit_scale. `upload.py` copies checkpoints to a store, and `download.py` brings them back.
`find.py` finds the newest undamaged one.
"""

from clipscale.checkpoint.download import check_copy
from clipscale.checkpoint.find import newest_undamaged
from clipscale.checkpoint.loading import load, read_description
from clipscale.checkpoint.retention import Retention
from clipscale.checkpoint.saving import Saver
from clipscale.checkpoint.state import CheckpointDescription, CheckpointState
from clipscale.checkpoint.upload import CheckpointUploader, finish_copy_on_failed_start

__all__ = [
    "CheckpointDescription",
    "CheckpointState",
    "CheckpointUploader",
    "Retention",
    "Saver",
    "check_copy",
    "finish_copy_on_failed_start",
    "load",
    "newest_undamaged",
    "read_description",
]  # fmt: skip
