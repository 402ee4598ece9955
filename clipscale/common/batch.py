"""How a batch is divided: chunks and their ranges of rows, captions and hard negatives."""

from dataclasses import dataclass

# First row, and the row after the last.
Span = tuple[int, int]


@dataclass(frozen=True)
class ChunkSizes:
    """Samples per chunk of each tower."""

    image: int
    text: int
    # The kind of device that they were found on.
    device: str


def equal_spans(rows: int, size: int) -> list[Span]:
    """The spans of `size` rows each. The last one may be shorter."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


@dataclass(frozen=True)
class TextLayout:
    """The texts of a batch of N images: the k captions of the first image, of the second, ..., then all hard negatives.

    Text j < N k is a caption of image j // k. A hard negative is a negative of every image.
    """

    # Captions of each image: k.
    captions: int = 1
    # Hard negatives that come with each image.
    negatives: int = 0

    @property
    def texts_per_sample(self) -> int:
        """Captions and hard negatives that come with each image."""
        return self.captions + self.negatives

    def rows_of(self, image: int, num_images: int) -> list[int]:
        """The rows of an image's captions, and then of its hard negatives."""
        first_caption = image * self.captions
        first_negative = num_images * self.captions + image * self.negatives
        return [
            *range(first_caption, first_caption + self.captions),
            *range(first_negative, first_negative + self.negatives),
        ]

    def first_captions(self, num_images: int) -> slice:
        """The rows of each image's first caption."""
        return slice(0, num_images * self.captions, self.captions)


# One caption of each image, and no hard negatives.
ONE_CAPTION = TextLayout()
