"""The encoders' inputs of a batch, and the message in which all ranks agree on their counts, one step ahead."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.data.loader.to_device import ChunkLoader, TextLoader
from clipscale.distributed.world import AsyncReduction, World


class StepFacts(NamedTuple):
    """Facts of a step on which all ranks agree."""

    # The most text chunks of any rank; None if a rank did not know its number.
    text_chunks: int | None
    # The labels in the captions of all ranks; None if a rank did not know its number.
    caption_labels: int | None
    # Whether any rank asks for a checkpoint after the step that carried the message.
    wants_save: bool


@dataclass(frozen=True)
class StepAgreement:
    """The ranks' agreement on the next step: `facts`, which an all-reduce finds.

    step n:    before the replay `start` begins the all-reduce, with this rank's counts of step n + 1
               replay, update
    step n+1:  uses `facts`; for a count that is None it makes an all-reduce of its own
    """

    # The maximum over ranks of [is unknown, wants save, text chunks], and for a captioner of one entry for each rank. A
    # rank sends the number of its caption labels in its own entry, and zeros in the entries of the others.
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
    ) -> "StepAgreement":
        """Begin the all-reduce. A collective.

        `batch`, `texts`, `chunk_size`: see the attributes. `caption_labels`: of a captioner's batch, 0 if it has
        not arrived; None without a captioner.
        """
        text_chunks = 0 if texts is None else texts.num_chunks
        labels = [] if caption_labels is None else world.one_hot_by_rank(caption_labels)
        message = world.all_reduce_max_async(int(batch is None), int(wants_save), text_chunks, *labels)
        return StepAgreement(message, batch, texts, chunk_size)

    @cached_property
    def facts(self) -> StepFacts:
        """What the ranks agree on. Waits for the all-reduce."""
        is_unknown, wants_save, text_chunks, *labels = self.message.values()
        if is_unknown:
            return StepFacts(None, None, bool(wants_save))
        return StepFacts(text_chunks, sum(labels), bool(wants_save))


@dataclass
class AgreedInputs:
    """The encoders' inputs of this rank's batches, and the number of caption labels, as all ranks agree on them.

    All ranks make equally many text chunks. It keeps the agreement on the next batch.
    """

    world: World
    # Whether a batch's pixels and texts stay on the device between the passes.
    stays_on_device: bool
    # Whether texts, or a captioner's pairs, are sorted by length, so that they lose their padding. The features of such
    # a text tower must not depend on the padding.
    sorts_captions: bool
    # Whether sorted texts come in equally large chunks, as a captioner needs; see `SortedTexts`.
    has_equal_chunks: bool = False
    # On the next batch to be encoded; None before the first step of a start.
    agreement: StepAgreement | None = None

    def images(self, batch: HostBatch) -> ChunkLoader:
        """The image tower's input."""
        return ChunkLoader(batch.pixels, len(batch), self.world.device, stays_on_device=self.stays_on_device)

    def texts(self, batch: HostBatch, chunk_size: int) -> TextLoader:
        """The text tower's input; if it is sorted, in equally many chunks on all ranks.

        `chunk_size`: texts of a chunk. A collective if texts are sorted and the agreement does not have the number of
        chunks.
        """
        agreement = self.agreement
        if agreement and agreement.batch is not None:
            assert agreement.batch is batch, "the ranks have agreed on another batch"
            assert agreement.chunk_size == chunk_size, "the ranks have agreed on chunks of another size"
        texts = agreement.texts if agreement else None
        if texts is None:
            texts = self.local_texts(batch, chunk_size)
        if self.sorts_captions:
            num_chunks = agreement.facts.text_chunks if agreement else None
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
        """The labels in the captions of the global batch. A collective if the agreement does not have the number.

        `local_labels`: the labels in this rank's captions.
        """
        agreed = self.agreement.facts.caption_labels if self.agreement else None
        if agreed is not None:
            return agreed
        return sum(self.world.all_reduce_max(*self.world.one_hot_by_rank(local_labels)))

    def start_agreement(
        self, upcoming: HostBatch | None, chunk_size: int, *, wants_save: bool, caption_labels: int | None = None
    ) -> StepAgreement:
        """Begin the agreement on the next step, and sort its texts ahead. A collective.

        Call it after the first pass of the present step, which uses the agreement that this one replaces.

        `upcoming`: the next batch, if it has arrived. `chunk_size`: texts of a chunk. `caption_labels`: see
        `StepAgreement.start`.
        """
        texts = None if upcoming is None else self.local_texts(upcoming, chunk_size)
        self.agreement = StepAgreement.start(
            self.world, upcoming, texts, chunk_size, wants_save=wants_save, caption_labels=caption_labels
        )
        return self.agreement

    def discard_agreement(self) -> None:
        """Discard the agreement on the next batch, because that batch or the one before it is discarded."""
        self.agreement = None
