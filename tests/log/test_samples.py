"""The sheet of training samples: pixels and captions of the batch, as text; the batches stay as they are."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipscale.log.samples import write_samples
from clipscale.models.tokenizer import tokenizer_of
from tests.data.files import picture, write_tar
from tests.data.streams import content, contents, open_stream

CAPTION = "A  <b>Red</b> star & café " + "far " * 20


@pytest.mark.parametrize(("backend", "workers"), [("host", 0), ("encoded", 0), ("encoded", 1)])
def test_a_sheet_shows_the_batch_and_leaves_it_as_it_was(tmp_path: Path, backend: str, workers: int) -> None:
    tokenizer = tokenizer_of("test", {"context_length": 16})
    options = {"batch": 20, "side": 32, "backend": backend, "chunk": 7, "workers": workers, "tokenizer": tokenizer}
    kinds = {"png": picture(0, (60, 40)), "txt": CAPTION.encode()}
    shards = write_tar(tmp_path / "0.tar", [(f"{i:02}.{kind}", kinds[kind]) for i in range(40) for kind in kinds])
    with open_stream(shards, **options) as stream, open_stream(shards, **options) as plain:
        batch = stream.next_batch()
        write_samples(tmp_path / "samples.html", batch, tokenizer)
        pixels = batch.pixels(0, 7).clone()
        assert [content(batch), *contents(stream, 2)] == contents(plain, 3)
    sheet = (tmp_path / "samples.html").read_text()
    pictures = re.findall(r"base64,([^\"]+)", sheet)
    assert len(pictures) == 16 == sheet.count("<figure>")
    for shown, row in zip(pictures, pixels.permute(0, 2, 3, 1).numpy()):
        actual = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown))).convert("RGB"), float)
        assert np.abs(actual - row).mean() < 8, "WebP's loss alone"
    captions = re.findall(r"<p [^>]*>(.*?)</p>", sheet)
    assert captions == ["a &lt; b &gt; red &lt;/ b &gt; star &amp; café far far far"] * 16, (
        "cut at the context, and text"
    )
