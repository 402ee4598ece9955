"""One small all-reduce during the second pass, in which the ranks tell each other about the next step."""

from dataclasses import dataclass

from clipscale.distributed.world import AsyncReduction, World

# Indices into the message. From CAPTION_LABELS on it has one entry for each rank.
TEXT_CHUNKS, IS_UNKNOWN, WANTS_SAVE, CAPTION_LABELS = range(4)


@dataclass(frozen=True)
class NextStepInfo:
    """What a step needs from all ranks before it begins, and whether a checkpoint is saved before it. Reading it waits
    for the all-reduce.

    step n:    replay begins -> `start` begins the all-reduce, with this rank's counts of step n + 1
               replay, update
    step n+1:  reads `num_text_chunks` and `num_caption_labels`; where one is 0, it asks the ranks itself
    """

    # The maximum over ranks of [text chunks, is unknown, wants save]. A captioner adds the caption labels of each rank;
    # a rank sends zeros for the others.
    message: AsyncReduction

    @classmethod
    def start(
        cls, world: World, *, text_chunks: int, is_known: bool, wants_save: bool, caption_labels: int | None
    ) -> "NextStepInfo":
        """Begin the all-reduce. A collective.

        `text_chunks`, `caption_labels`: of this rank's next batch. `is_known`: whether that batch has arrived; if not,
        they are 0. Without a captioner `caption_labels` is None.
        """
        labels = [] if caption_labels is None else world.one_hot(caption_labels)
        is_unknown = int(not is_known)
        return cls(world.all_reduce_max_async(text_chunks, is_unknown, int(wants_save), *labels))

    @property
    def num_text_chunks(self) -> int:
        """The most text chunks of any rank; 0 if a rank did not know its number."""
        entries = self.message.values()
        return 0 if entries[IS_UNKNOWN] else entries[TEXT_CHUNKS]

    @property
    def num_caption_labels(self) -> int:
        """The labels in the captions of all ranks; 0 if a rank did not know its number."""
        entries = self.message.values()
        return 0 if entries[IS_UNKNOWN] else sum(entries[CAPTION_LABELS:])

    @property
    def wants_save(self) -> bool:
        """Whether any rank wishes to save a checkpoint."""
        return self.message.values()[WANTS_SAVE] > 0
