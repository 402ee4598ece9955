"""The inputs of the encoders of a batch."""

from dataclasses import dataclass

from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.data.loader.to_device import ChunkLoader, TextLoader
from clipscale.distributed.world import World


@dataclass(frozen=True)
class InputBuilder:
    """Builds the encoders' inputs of this rank's batches."""

    world: World
    # Whether a batch's pixels and texts stay on the device between the passes.
    stays_on_device: bool
    # Whether texts, or a captioner's pairs, are sorted by length, so that they lose their padding. The features of such
    # a text tower must not depend on the padding.
    sorts_captions: bool
    # Whether sorted texts come in equally large chunks, as a captioner needs; see `SortedTexts`.
    has_equal_chunks: bool = False

    def images(self, batch: HostBatch) -> ChunkLoader:
        """The image tower's input."""
        return ChunkLoader(batch.pixels, len(batch), self.world.device, stays_on_device=self.stays_on_device)

    def texts(self, batch: HostBatch, chunk_size: int) -> TextLoader:
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
