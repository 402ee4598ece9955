"""Whether a run sorts its captions and cuts their padding off, decided once; the text tower's input of each step."""

from clipscale.config.train import TrainConfig
from clipscale.data.loader.captions import SortedCaptions
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import World
from clipscale.models.captions import padding
from clipscale.models.towers import ClipModel


class CaptionRule:
    """A run sorts if `data.sort_captions` asks for it and its text tower allows it. All ranks make it."""

    def __init__(self, config: TrainConfig, world: World, model: ClipModel) -> None:
        self.world, self.resident, self.context = world, config.offload == "none", model.context_length
        self.pad: int | None = None
        """The padding token; None: captions keep their order and the whole context."""
        self.note = ""
        """Why captions are not sorted, if the settings ask for it."""
        if not config.data.sort_captions:
            return
        pad = world.on_main(lambda: padding(model.text, model.tokenizer, world.device))
        if isinstance(pad, int):
            self.pad = pad
        else:
            self.note = f"data.sort_captions: {pad}; captions keep their order and the whole context"

    def input(self, batch: HostBatch, *, sort: bool) -> ChunkLoader | SortedCaptions:
        """The text tower's input; sorted if this run sorts and this step may."""
        device = self.world.device
        if self.pad is None or not sort:
            return ChunkLoader(batch.tokens, len(batch), device, resident=self.resident)
        most = lambda chunks: self.world.highest(chunks)[0]  # noqa: E731
        return SortedCaptions(batch.tokens, len(batch), device, pad=self.pad, resident=self.resident, most=most)

    def widths(self, texts: ChunkLoader | SortedCaptions) -> dict[int, int]:
        """Captions of a step that has run, by the width at which the tower computed them."""
        return texts.widths() if isinstance(texts, SortedCaptions) else {self.context: len(texts)}
