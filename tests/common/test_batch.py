"""Every text has one row, and each image's first caption is found again."""

from hypothesis import given
from hypothesis import strategies as st

from clipscale.common.batch import TextLayout


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 7))
def test_each_row_has_one_text_and_captions_come_first(captions: int, negatives: int, num_images: int) -> None:
    layout = TextLayout(captions, negatives)
    image_of_row = {row: image for image in range(num_images) for row in layout.rows_of(image, num_images)}
    assert sorted(image_of_row) == [*range(num_images * layout.texts_per_sample)]
    assert all(image_of_row[row] == row // captions for row in range(num_images * captions))


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 7))
def test_the_first_captions_are_one_of_each_image_in_order(captions: int, negatives: int, num_images: int) -> None:
    layout = TextLayout(captions, negatives)
    rows = [*range(num_images * layout.texts_per_sample)]
    assert rows[layout.first_captions(num_images)] == [
        layout.rows_of(image, num_images)[0] for image in range(num_images)
    ]
