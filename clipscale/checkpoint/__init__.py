"""Checkpoints of a run: sharded, written in the background, and verified before they are used.

A checkpoint is a folder, `saving.py` writes it and `loading.py` reads it:

    step_00001000/__0_0.distcp, ...   tensors, one file for each rank that wrote (torch.distributed.checkpoint)
    step_00001000/.metadata           which tensor is where
    step_00001000/meta.json           everything else; and the size and the CRC-32 of each file above

It holds a tree of dictionaries. Its tensors are stored by the keys on the way to them, such as model/logit_scale. What
`TrainState.state_dict` and `Run.save` put into it:

    step, samples, batch   steps and samples that have been trained on, samples of a step
    loss                   of that step
    model                  weights by name; of a run with adapters the trained ones alone
    model_config           the settings of the model
    frozen                 digests of the towers' frozen weights, for a run with adapters
    optimizer              its state and its groups by the parameters' names
    optimizer_name         the setting optim.name
    scaler                 the loss scale of fp16
    ema                    the moving average of the weights
    chunks                 samples per chunk by tower, and the device they are for
    random                 the random states of each rank
    position               where each shard stream stands in the data
"""

from clipscale.checkpoint.folder import check_room, make_folder, remove_temporary, set_aside
from clipscale.checkpoint.loading import load, read_values, verify
from clipscale.checkpoint.resume import check_fits, to_resume
from clipscale.checkpoint.saving import Saver, UnwritableError
from clipscale.common.checkpoints import checkpoints_of, locate, path_of, step_of

__all__ = [
    "Saver", "UnwritableError", "check_fits", "check_room", "checkpoints_of", "load", "locate", "make_folder",
    "path_of", "read_values", "remove_temporary", "set_aside", "step_of", "to_resume", "verify",
]  # fmt: skip
