"""Encodes images and texts on all ranks.

The work is cut into batches that do not depend on the number of ranks. Of P ranks, rank r takes batches r, r + P,
r + 2P and so on. So 1, 2 and 4 processes make the same forward passes and get the same features. All ranks make equally
many passes, because FSDP2's towers communicate in their forward pass. A rank without work repeats an input.

N: inputs, n: inputs of a batch, C: classes, U: distinct class names, D: feature width.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.pool import MapResult, ThreadPool
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.common.signals import Poll, no_poll
from clipscale.data.eval_transform import prefetched
from clipscale.data.sample import BrokenSampleError
from clipscale.distributed.agreement import run_on_all_ranks
from clipscale.distributed.world import World
from clipscale.eval import zero_shot
from clipscale.loss.communicator import Communicator
from clipscale.models.towers import ClipModel

T = TypeVar("T")

# Seconds between two calls of `EvalEncoder.poll_while_waiting`.
POLL_S = 0.25
# The rank of a query that finds no answer: a miss at every k. Also the rank of an image that is left out.
MISSED = torch.iinfo(torch.int64).max


def batch_ranges(count: int, batch_size: int, world: World) -> list[range]:
    """This rank's batches of the indices 0..count-1. All ranks have equally many; the last ones may be empty."""
    step = batch_size * world.size
    rounds = -(-count // step)
    return [range(count)[start : start + batch_size] for start in range(world.rank * batch_size, rounds * step, step)]


def gather_batches(batches: Sequence[Tensor], count: int, batch_size: int, world: World) -> Tensor:
    """The rows of all batches on every rank, in order: (count, ...). `batches`: this rank's, by `batch_ranges`."""
    batch_size = min(batch_size, count)
    rows = torch.stack([torch.cat([x, x.new_zeros(batch_size - len(x), *x.shape[1:])]) for x in batches])
    comm = Communicator.for_group(None)
    gathered = comm.all_gather(rows) if comm else rows
    ordered = gathered.view(world.size, len(batches), *rows.shape[1:]).transpose(0, 1)
    return ordered.reshape(-1, *rows.shape[2:])[:count]


class ImageBatch(NamedTuple):
    """A batch of encoded images of this rank."""

    # The images' indices in the set. Empty: this rank had no work left, and has encoded a substitute.
    span: range
    # Unit rows (n, D).
    features: Tensor
    # (n,) bool: whether each image could be decoded.
    usable: Tensor


@dataclass(frozen=True)
class EvalEncoder:
    """Unit features of images, texts and classes, by all ranks together."""

    model: ClipModel
    world: World
    autocast: Callable[[], AbstractContextManager[object]]
    batch_size: int
    threads: int
    # Called equally often on every rank; what it raises ends the evaluation.
    poll: Poll = no_poll
    # Called a few times a second while this rank waits for pictures; what it raises ends the evaluation.
    poll_while_waiting: Poll = no_poll
    progress: Callable[[str, int, int], None] = lambda *_: None
    # The training's objective; empty: not known.
    objective: str = ""
    # Matryoshka sizes: the first `size` dimensions of a feature were trained as a feature of their own.
    sizes: Sequence[int] = ()

    def at_sizes(self, rows: Tensor) -> list[Tensor]:
        """The features (n, D), then for each of the `sizes` their first `size` dimensions: unit rows (n, size)."""
        return [rows, *(F.normalize(rows[:, :size], dim=-1) for size in self.sizes)]

    def with_progress(self, ranges: list[range], subject: str) -> Iterator[range]:
        """The batches, one after another; `progress` shows how many are done."""
        for done, span in enumerate(ranges):
            self.progress(f"evaluation of {subject}", done, len(ranges))
            yield span
        self.progress(f"evaluation of {subject}", len(ranges), len(ranges))

    def encode_text_batch(self, texts: list[str]) -> Tensor:
        """Features (n, D) of one batch of texts."""
        self.poll()
        tokens_nT = self.model.tokenizer(texts)
        with self.autocast():
            return self.model.text(tokens_nT.to(self.world.device))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Features (N, D) of all texts, on every rank."""

        def features(span: range) -> Tensor:
            return F.normalize(self.encode_text_batch([texts[i] for i in span]).float(), dim=-1)

        return self.gathered_rows(len(texts), self.batch_size, "captions", features)

    def gathered_rows(self, count: int, batch_size: int, subject: str, rows: Callable[[range], Tensor]) -> Tensor:
        """The rows (count, ...) that `rows` makes of each batch, on every rank. `subject`: for the progress."""
        batches = self.with_progress(batch_ranges(count, batch_size, self.world), subject)
        return gather_batches([rows(span or range(1))[: len(span)] for span in batches], count, batch_size, self.world)

    def encode_classes(self, classnames: Sequence[str], templates: Sequence[str], label: str) -> tuple[Tensor, Tensor]:
        """Embeddings (U, D) of the distinct class names, and the row of each class (C,), on every rank. `label`: the
        set's, for the progress.

        Classes of one name have one row, and so the same score to the last bit.
        """
        row = {name: index for index, name in enumerate(dict.fromkeys(classnames))}
        names = list(row)

        def embeddings(span: range) -> Tensor:
            return zero_shot.class_embeddings(
                self.encode_text_batch, [names[i] for i in span], templates, batch_size=self.batch_size
            )

        classes_UD = self.gathered_rows(
            len(names), max(1, self.batch_size // len(templates)), f"the classes of {label}", embeddings
        )
        return classes_UD, torch.tensor([row[name] for name in classnames], device=self.world.device)

    def encode_images(
        self,
        count: int,
        read: Callable[[int], bytes],
        label: str,
        broken: Counter[str],
        take_tokens: Callable[[range, Tensor, Tensor, Tensor], None] | None = None,
    ) -> Iterator[ImageBatch]:
        """Yield this rank's batches. Threads decode the next batch while the device encodes this one.

        read: returns the bytes of image 0..count-1, or raises BrokenSampleError, OSError or ValueError. label: the
        set's, for the progress. broken: after the last batch, has the images of all ranks that are not usable, by
        reason. take_tokens: gets each batch's indices, whether each image is usable, the pixels, and a captioner's
        tokens of them (n, P, W).
        """
        transform = self.model.eval_transform()
        blank = np.zeros((3, transform.image_size, transform.image_size), np.uint8)

        def pixels_of(index: int) -> tuple[np.ndarray, str]:
            try:
                return transform(read(index)), ""
            except BrokenSampleError as error:
                return blank, error.reason
            except (OSError, ValueError):
                return blank, "unreadable_file"

        reasons: Counter[str] = Counter()
        waits = PictureWaits(self.world, self.poll_while_waiting)
        batches = batch_ranges(count, self.batch_size, self.world)
        with ThreadPool(self.threads) as pool:
            shown = self.with_progress(batches, f"{label}'s pictures")
            for span, (_, pending) in zip(shown, prefetched(pool, pixels_of, batches)):
                decoded = waits.wait_for(pending, [(blank, "")] * len(span))
                self.poll()
                reasons.update(reason for _, reason in decoded if reason)
                usable = torch.tensor([not reason for _, reason in decoded], dtype=torch.bool)
                pixels = torch.from_numpy(np.stack([image for image, _ in decoded] or [blank])).to(self.world.device)
                with self.autocast():
                    if take_tokens:
                        features, tokens = self.model.image(pixels, with_tokens=True)
                        take_tokens(span, usable, pixels, tokens)
                    else:
                        features = self.model.image(pixels)
                yield ImageBatch(span, F.normalize(features.float(), dim=-1)[: len(span)], usable.to(self.world.device))
        run_on_all_ranks(self.world, waits.check)
        for reasons_of_rank in self.world.all_gather_object(reasons):
            broken.update(reasons_of_rank)


class PictureWaits:
    """Waits for decoded pictures. An error of `poll_while_waiting` on one of several ranks is deferred.

    1. When the poll fails, this rank goes on with substitutes, so that the other ranks meet it in their collectives.
    2. A later `poll` of all ranks may raise the error everywhere.
    3. Otherwise `check` raises it at the end of the pass.
    """

    def __init__(self, world: World, poll_while_waiting: Poll) -> None:
        self._world = world
        self._poll = poll_while_waiting
        self._deferred: UserError | None = None

    def wait_for(self, pending: MapResult[T], substitutes: list[T]) -> list[T]:
        """The results of `pending`, or the substitutes if an error is deferred."""
        while not (self._deferred or pending.ready()):
            pending.wait(POLL_S)
            try:
                self._poll()
            except UserError as error:
                if self._world.size == 1:
                    raise
                self._deferred = error
        return substitutes if self._deferred else pending.get()

    def check(self) -> None:
        """Raise the deferred error, if there is one."""
        if self._deferred:
            raise self._deferred
