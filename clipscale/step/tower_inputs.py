"""The encoders' inputs of a batch, in equally many text chunks on all ranks; and the message that counts them ahead."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.data.loader.to_device import ChunkLoader, TextLoader
from clipscale.distributed.world import AsyncReduction, World


@dataclass
class TowerInputs:
    """Makes the encoders' inputs of this rank's batches, and counts what all ranks must know of them.

    All ranks make equally many text chunks, and know the number of caption labels in the global batch. A `NextStepSync`
    has found both numbers, if all ranks' batches had arrived in the step before. Otherwise the methods ask for them.
    """

    world: World
    # Whether a batch's pixels and texts stay on the device between the passes.
    stays_on_device: bool
    # Whether texts, or a captioner's pairs, are sorted by length, so that they lose their padding. The features of such
    # a text tower must not depend on the padding.
    sorts_captions: bool
    # Whether sorted texts come in equally large chunks, as a captioner needs; see `SortedTexts`.
    has_equal_chunks: bool = False
    # The message about the next batch to be encoded; None before the first step of a start.
    next_step_sync: "NextStepSync | None" = None

    def images(self, batch: HostBatch) -> ChunkLoader:
        """The image tower's input."""
        return ChunkLoader(batch.pixels, len(batch), self.world.device, stays_on_device=self.stays_on_device)

    def texts(self, batch: HostBatch, chunk_size: int) -> TextLoader:
        """The text tower's input; if it is sorted, in equally many chunks on all ranks.

        `chunk_size`: texts of a chunk. A collective if texts are sorted and their number of chunks is not known yet.
        """
        sync = self.next_step_sync
        if sync and sync.batch is not None:
            assert sync.batch is batch, "the ranks have agreed on another batch"
            assert sync.chunk_size == chunk_size, "the ranks have agreed on chunks of another size"
        texts = sync.texts if sync else None
        if texts is None:
            texts = self.local_texts(batch, chunk_size)
        if self.sorts_captions:
            num_chunks = sync.result.text_chunks if sync else None
            if num_chunks is None:
                [num_chunks] = self.world.all_reduce_max(texts.num_chunks)
            texts.split(num_chunks)
        return texts

    def local_texts(self, batch: HostBatch, chunk_size: int) -> TextLoader:
        """The text tower's input. If texts are sorted, waits for all of them, and makes this rank's own chunks."""
        if not self.sorts_captions:
            return TextLoader(
                batch.tokens,
                batch.num_texts,
                batch.context_length,
                self.world.device,
                stays_on_device=self.stays_on_device,
            )
        texts = SortedTexts(
            batch.tokens,
            batch.lengths,
            batch.num_texts,
            batch.context_length,
            self.world.device,
            stays_on_device=self.stays_on_device,
            has_equal_chunks=self.has_equal_chunks,
        )
        texts.make_chunks(chunk_size)
        return texts

    def num_caption_labels(self, local_labels: int) -> int:
        """The labels in the captions of the global batch. A collective if the number is not known yet.

        `local_labels`: the labels in this rank's captions.
        """
        labels = self.next_step_sync.result.caption_labels if self.next_step_sync else None
        if labels is not None:
            return labels
        return sum(self.world.all_reduce_max(*self.world.one_hot_by_rank(local_labels)))

    def start_next_step_sync(
        self, upcoming: HostBatch | None, chunk_size: int, *, wants_save: bool, caption_labels: int | None = None
    ) -> "NextStepSync":
        """Sort the texts of the next batch, and send the message about it. A collective.

        Call it after the first pass of the present step, whose own message this one replaces.

        `upcoming`: the next batch, if it has arrived. `chunk_size`: texts of a chunk. `caption_labels`: see
        `NextStepSync.start`.
        """
        texts = None if upcoming is None else self.local_texts(upcoming, chunk_size)
        self.next_step_sync = NextStepSync.start(
            self.world, upcoming, texts, chunk_size, wants_save=wants_save, caption_labels=caption_labels
        )
        return self.next_step_sync

    def discard_next_step_sync(self) -> None:
        """Discard the message about the next batch, because that batch or the one before it is discarded."""
        self.next_step_sync = None


class SyncResult(NamedTuple):
    """What all ranks know after a `NextStepSync`."""

    # The most text chunks of any rank; None if a rank did not know its number.
    text_chunks: int | None
    # The labels in the captions of all ranks; None if a rank did not know its number.
    caption_labels: int | None
    # Whether any rank asks for a checkpoint after the step that sent the message.
    wants_save: bool


@dataclass(frozen=True)
class NextStepSync:
    """The ranks' message about the next step: one all-reduce, which travels while the present step is replayed.

    Each rank sends

    - whether its next batch has not arrived,
    - whether it asks for a checkpoint after the present step,
    - the number of text chunks in its next batch,
    - with a captioner, the number of caption labels in its next batch.

    step n:    before the replay, `start` sends the message
               after the update, `TrainStep.run` reads whether any rank asks for a checkpoint
    step n+1:  in its first pass, `TowerInputs` reads the two numbers. If a rank did not know its own, each of them
               takes an all-reduce of its own
    """

    # The maximum over ranks of [has not arrived, asks for a checkpoint, text chunks], and for a captioner of one entry
    # for each rank: a rank sends its caption labels in its own entry, and zeros in the entries of the others.
    message: AsyncReduction
    # This rank's next batch, and its texts, if they had arrived.
    batch: HostBatch | None = None
    texts: TextLoader | None = None
    # The size for which these texts are cut into chunks.
    chunk_size: int = 0

    @staticmethod
    def start(
        world: World,
        batch: HostBatch | None,
        texts: TextLoader | None,
        chunk_size: int,
        *,
        wants_save: bool,
        caption_labels: int | None = None,
    ) -> "NextStepSync":
        """Send the message. A collective.

        `batch`, `texts`, `chunk_size`: see the attributes. `caption_labels`: of a captioner's batch, 0 if it has
        not arrived; None without a captioner.
        """
        text_chunks = 0 if texts is None else texts.num_chunks
        labels = [] if caption_labels is None else world.one_hot_by_rank(caption_labels)
        message = world.all_reduce_max_async(int(batch is None), int(wants_save), text_chunks, *labels)
        return NextStepSync(message, batch, texts, chunk_size)

    @cached_property
    def result(self) -> SyncResult:
        """What all ranks know now. Waits for the all-reduce."""
        is_unknown, wants_save, text_chunks, *labels = self.message.values()
        if is_unknown:
            return SyncResult(None, None, bool(wants_save))
        return SyncResult(text_chunks, sum(labels), bool(wants_save))
