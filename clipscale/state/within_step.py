"""Saves where a long step stands (`checkpoint.within_step`), so that a killed one does not start over.

RUN/checkpoints/step_N.within/ holds a file for each rank: the features so far, the random state of every chunk, and how many chunks the
second pass has replayed. Rank 0's file also has the parameter gradients so far, summed over ranks. Weights, optimizer and the place in the
data are those of the checkpoint step_N, which is written first.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from clipscale.checkpoint import archive, folder, saved_state
from clipscale.common.errors import UserError, first_line, one_line
from clipscale.common.files import inner_folder, replacing
from clipscale.config.setting import flat
from clipscale.config.train import TrainConfig
from clipscale.distributed.sums import SummedTower
from clipscale.distributed.world import Later, World
from clipscale.state.train_state import TrainState

log = logging.getLogger(__name__)

SECTIONS = ("batch", "seed", "model", "data", "precision", "ramp")
"""Settings on which features depend."""


class WithinStep:
    """The progress of the current step on one rank. All ranks call its methods at the same places."""

    def __init__(self, run: Path, world: World, config: TrainConfig, state: TrainState) -> None:
        """Raises UserError where a step cannot be cut into parts."""
        self.run, self.world, self.state, self.config = run, world, state, config
        self.minutes = config.checkpoint.within_step
        if self.minutes and state.statistics():
            raise UserError(
                "checkpoint.within_step: batch normalisation takes a step's batch as one chunk; leave it 0, or set model.batch_norm=frozen"
            )
        self.save_base: Callable[[], None] = lambda: None
        """Writes the checkpoint of the state before the step, if there is none yet."""
        self.found: dict[str, Any] | None = None
        """The progress of an earlier start in the step that comes next."""
        self._step, self._loss, self._round, self._on = 0, "", 0, False
        self._saved_at = 0.0
        self._vote: Later | None = None

    def begin(self, step: int, loss: float, *, measured: bool) -> None:
        """A step begins after `step` steps, the last of which had this loss. `measured`: its noise scale is, which takes the whole step."""
        self._step, self._loss, self._on = step, repr(loss), self.minutes > 0 and not measured
        self._saved_at, self._vote = time.monotonic(), None

    def check(self) -> None:
        """Between two chunks: save if it is time. Ranks learn of it one call later, so that no rank waits for the slowest."""
        if not self._on:
            return
        due = self.world.main and time.monotonic() - self._saved_at > 60 * self.minutes
        if self.world.size > 1:
            before, self._vote = self._vote, self.world.highest_later(int(due))
            due = bool(before and before.values()[0])
        if due:
            self.save()
            self._vote = None

    def save(self) -> None:
        """Write the progress. A failure is reported, and training goes on."""
        if not self._on:
            return
        self.save_base()
        self._round += 1
        content = {"about": self._about(), "cache": self.state.cache.state_dict(), "gradients": self._gradients()}
        if self.config.launch.parallel == "fsdp":  # sums of gradients are inside of FSDP2: the second pass starts over
            for tower in content["cache"]["towers"]:
                tower["replayed"] = 0
        path, problem = self._path(self._round), ""
        try:
            inner_folder(path.parent.parent, path.parent.name)
            with replacing(path, sync=True) as file:
                torch.save(tree_map_only(Tensor, lambda x: x.cpu(), content), file)
        except (OSError, RuntimeError) as error:
            problem = first_line(error)
        problems = [problem for problem in self.world.gather(problem) if problem]
        if problems and self.world.main:
            log.warning("%s could not be written (%s); training goes on without it", path.parent, problems[0])
        elif not problems:
            for old in path.parent.glob(f"*_{self.world.rank:05d}.pt"):
                if old != path:
                    old.unlink(missing_ok=True)
        self._saved_at = time.monotonic()

    def load(self, step: int, loss: float) -> None:
        """Look for progress in the step after `step`. What does not fit this run is left out, and a note says why."""
        self._step, self._loss = step, repr(loss)
        own: dict[int, dict[str, Any]] = {}
        for path in sorted(self._path(0).parent.glob(f"*_{self.world.rank:05d}.pt")):
            try:
                archive.verify(path)
                content = archive.load(path, mmap=True)  # of several files, the one that is used is read
                self._check(content)
                own[int(path.name.split("_")[0])] = content
            except Exception as error:  # the unpickler, zipfile and torch have their own
                log.warning("%s is damaged (%s)", path, one_line(error))
        rounds = set.intersection(*map(set, self.world.gather(sorted(own))))
        if not rounds:
            return
        content = own[max(rounds)]
        theirs, ours = content["about"], self._about()
        other = [name for name in ours if theirs.get(name) != ours[name]]
        reasons = [reason for reason in self.world.gather(", ".join(other)) if reason]
        if reasons:
            self.state.notes.append(f"step {step + 1} starts over: its progress was saved with other {reasons[0]}")
            return
        self._round, self.found = max(rounds), content
        towers = content["cache"]["towers"]
        encoded = " and ".join(str(len(tower["random"])) for tower in towers)
        replayed = " and ".join(str(tower["replayed"]) for tower in towers)
        self.state.notes.append(f"step {step + 1} goes on where it was: {encoded} chunks encoded, {replayed} replayed")

    def _check(self, content: Any) -> None:
        """Raise ValueError for progress that this run cannot go on from."""
        names = list(self.state.towers)
        shape = (self.state.local_batch, self.state.model.width)
        saved_state.check_progress(content, [self.state.trained(name) for name in names], names, shape)

    def restore(self) -> None:
        """Let the step that begins go on from what `load` has found. Its gradients are clear."""
        if self.found is None:
            return
        content, self.found = self.found, None
        self.state.cache.load_state_dict(content["cache"])
        saved = content["gradients"]
        for name, tower in zip(self.state.towers, content["cache"]["towers"], strict=True):
            for index, p in enumerate(self.state.trained(name) if tower["replayed"] else ()):
                key = f"{name}.{index}"
                present, complete = self.world.broadcast((key in saved, saved.get("complete", [])))
                if not present:
                    continue
                value = saved.get(key)
                p.grad = torch.zeros_like(p) if value is None else value.to(p.device)
                if self.world.size > 1 and name in complete:
                    dist.broadcast(p.grad, 0)

    def _gradients(self) -> dict[str, Any]:
        """The gradients of both towers so far, on rank 0: summed over ranks, unless the second pass has done so with its last chunk."""
        found: dict[str, Any] = {"complete": []}
        if self.config.launch.parallel == "fsdp" and self.world.size > 1:
            return found
        for name, tower in zip(self.state.towers, self.state.cache.towers, strict=True):
            complete = tower.replayed == len(tower.spans)
            if complete and isinstance(tower.encoder, SummedTower):
                tower.encoder.finish()
            elif complete:
                found["complete"].append(name)
            for index, p in enumerate(self.state.trained(name) if tower.replayed else ()):
                if p.grad is None:
                    continue
                value = p.grad.detach()
                if self.world.size > 1 and not complete:
                    value = value.clone()
                    dist.reduce(value, 0)
                if self.world.main:
                    found[f"{name}.{index}"] = value
        return found

    def _about(self) -> dict[str, Any]:
        tree = asdict(self.config)
        settings = {name: repr(sorted(flat({name: tree[name]}), key=str)) for name in SECTIONS}
        captions = self.state.captions.pad is not None
        about = {"processes": self.world.size, "chunks": self.state.cut, "captions": captions, "loss": self._loss}
        return about | settings

    def _path(self, round: int) -> Path:
        return folder.within(self.run, self._step) / f"{round:06d}_{self.world.rank:05d}.pt"
