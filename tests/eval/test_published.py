"""A run's results are shown beside the results that its preset's source has published."""

from typing import Any

import pytest

from clipscale.common.record import Results
from clipscale.eval.published import parse_bands, published_line
from tests.support.user_errors import refused

EXPECTED = {
    "imagenet1k": {"top1": [18.5, 20]},
    "mscoco_captions": {"text_to_image_r5": [36.2, 38.2]},
    "source": "a paper",
}


@pytest.mark.parametrize(
    ("results", "line"),
    [
        ({"imagenet1k": {"top1": 0.189}}, "published: imagenet1k top1 18.9 %, within 18.5 to 20 (a paper)"),
        ({"imagenet/val": {"top1": 0.2004}}, "published: imagenet/val top1 20.0 %, within 18.5 to 20 (a paper)"),
        ({"imagenet1k (ema)": {"top1": 0.021}}, "published: imagenet1k (ema) top1 2.1 %, below 18.5 to 20 (a paper)"),
        (
            {"imagenet1k": {"top1": 0.3}, "mscoco_captions": {"text_to_image_r5": 0.37}},
            "published: imagenet1k top1 30.0 %, above 18.5 to 20; "
            "mscoco_captions text_to_image_r5 37.0 %, within 36.2 to 38.2 (a paper)",
        ),
        ({"imagenet1k (limit 200)": {"top1": 0.19}, "other": {"top1": 0.19}}, ""),
    ],
    ids=str,
)
def test_a_line_has_the_score_and_the_published_band(results: Results, line: str) -> None:
    assert published_line(EXPECTED, results) == line


@pytest.mark.parametrize("band", [[18.5], 19, [0.1, 200], "19", [20, 18]])
def test_a_band_is_two_percentages(band: Any) -> None:
    with refused(r"expected\.imagenet1k\.top1=.*: give"):
        parse_bands({"imagenet1k": {"top1": band}})
