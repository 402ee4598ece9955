"""The inputs of a step's towers: images, and captions perhaps sorted, in equally many chunks on all ranks."""

from dataclasses import dataclass

from clipscale.data.loader.captions import SortedCaptions, SortedPairs
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.to_device import ChunkLoader, PairLoader
from clipscale.distributed.world import World
from clipscale.models.captioner import count_caption_tokens
from clipscale.step.agreement import Agreement


@dataclass
class StepInputs:
    """Makes the towers' inputs of a batch. What it needs to know of other ranks is in the last step's `agreement`."""

    world: World
    # Whether a batch's pixels and captions stay on the device between the passes.
    is_resident: bool
    # Whether captions, or a captioner's pairs, are sorted by the captions' length, and lose their padding. For text
    # towers whose features do not depend on the padding.
    sort_captions: bool
    # Whether the model writes captions: its one input is pairs.
    writes_captions: bool = False
    # What the ranks agreed on in the last step.
    agreement: Agreement | None = None
    # The next step's captions, if they had arrived in the last one.
    sorted_ahead: SortedCaptions | None = None

    def images(self, batch: HostBatch) -> ChunkLoader:
        """The image tower's input."""
        return ChunkLoader(batch.pixels, len(batch), self.world.device, resident=self.is_resident)

    def captions(self, batch: HostBatch, size: int) -> ChunkLoader:
        """The text tower's input; if it is sorted, in equally many chunks on all ranks. `size`: captions of a chunk."""
        texts = self.own_captions(batch, size) if self.sorted_ahead is None else self.sorted_ahead
        if isinstance(texts, SortedCaptions):
            agreed = self.agreement.num_text_chunks if self.agreement else 0
            texts.split(agreed or self.world.all_reduce_max(texts.num_chunks)[0])
        return texts

    def own_captions(self, batch: HostBatch, size: int) -> ChunkLoader:
        """The text tower's input. If it is sorted, in this rank's own chunks; that waits for all captions."""
        device = self.world.device
        if not self.sort_captions:
            return ChunkLoader(batch.tokens, batch.texts, device, resident=self.is_resident)
        texts = SortedCaptions(
            batch.tokens,
            batch.lengths,
            batch.texts,
            device,
            resident=self.is_resident,
            is_even=self.writes_captions,
        )
        texts.make_chunks(size)
        return texts

    def pairs(self, batch: HostBatch, size: int) -> tuple[SortedPairs | PairLoader, ChunkLoader]:
        """The input of a captioner's encoder; and the captions in it. `size`: pairs of a chunk."""
        texts = self.captions(batch, size)
        if isinstance(texts, SortedCaptions):
            return SortedPairs(batch.pixels, texts), texts
        return PairLoader(self.images(batch), texts), texts

    def num_caption_tokens(self, batch: HostBatch) -> int:
        """The labels in the captions of the global batch: from the last step's message, or by one of its own.

        1 for a model that writes no captions.
        """
        if not self.writes_captions:
            return 1
        agreed = self.agreement.num_caption_tokens if self.agreement else 0
        return agreed or sum(self.world.all_reduce_max(*self.world.one_hot(own_caption_tokens(batch))))

    def agree(self, upcoming: HostBatch | None, size: int, *, save: bool) -> Agreement:
        """Begin the step's message between the ranks. `upcoming`: the next batch, if it has arrived."""
        texts = self.own_captions(upcoming, size) if upcoming else None
        self.sorted_ahead = texts if isinstance(texts, SortedCaptions) else None
        caption_tokens = None
        if self.writes_captions:
            caption_tokens = own_caption_tokens(upcoming) if upcoming else 0
        self.agreement = Agreement.begin(
            self.world,
            text_chunks=self.sorted_ahead.num_chunks if self.sorted_ahead else 0,
            is_known=upcoming is not None,
            save=save,
            caption_tokens=caption_tokens,
        )
        return self.agreement


def own_caption_tokens(batch: HostBatch) -> int:
    """The labels in this rank's captions. Waits for all samples."""
    return int(count_caption_tokens(batch.tokens(0, batch.texts)))
