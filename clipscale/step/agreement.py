"""What the ranks agree on in a step: one small message, which travels during the second pass."""

from dataclasses import dataclass

from clipscale.distributed.world import AsyncReduction, World


@dataclass(frozen=True)
class Agreement:
    """The ranks' message in a step: what the next step needs to know of all ranks, and whether to save."""

    # The largest over ranks of each entry: the number of text chunks; whether a rank does not know its numbers; whether
    # a rank wishes to save. For a captioner then each rank's caption tokens.
    message: AsyncReduction

    @classmethod
    def begin(
        cls, world: World, *, text_chunks: int, is_known: bool, save: bool, caption_tokens: int | None
    ) -> "Agreement":
        """Begin the message. A collective.

        `text_chunks`, `caption_tokens`: of this rank's next batch. `is_known`: whether that batch has arrived; else
        they are 0. Without a captioner `caption_tokens` is None.
        """
        tokens = [] if caption_tokens is None else world.one_hot(caption_tokens)
        return cls(world.all_reduce_max_async(text_chunks, not is_known, save, *tokens))

    @property
    def num_text_chunks(self) -> int:
        """The most text chunks of any rank; 0 if a rank did not know its number. Waits for the message."""
        num_chunks, unknown, *_ = self.message.values()
        return 0 if unknown else num_chunks

    @property
    def num_caption_tokens(self) -> int:
        """The labels in the captions of all ranks; 0 if a rank did not know its number. Waits for the message."""
        _, unknown, _, *tokens = self.message.values()
        return 0 if unknown else sum(tokens)

    @property
    def save(self) -> bool:
        """Whether any rank wishes to save a checkpoint. Waits for the message."""
        return self.message.values()[2] > 0
