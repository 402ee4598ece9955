"""Takes the pictures of the documentation: `python docs/pictures.py RUN...` writes docs/images/report*.png.

Run it in the repository's root, with Chromium installed.
"""

import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from clipscale.tools.report.page import write_report
from tests.support.browser import browser

HEIGHTS = {1280: 880, 390: 940}
"""Of what is kept of a page of this width."""


def main(runs: list[str]) -> None:
    page = write_report(runs).resolve().as_uri()
    with browser() as opened:
        for width, dark, name in ((1280, False, "report"), (1280, True, "report-dark"), (390, False, "report-phone")):
            path = Path(__file__).with_name("images") / f"{name}.png"
            opened.show(page, width, dark=dark)
            picture = Image.open(BytesIO(opened.picture())).convert("RGB")
            picture.crop((0, 0, picture.width, HEIGHTS[width])).quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
