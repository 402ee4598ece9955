"""A sheet of a run's first training samples, as the model sees them: augmented pictures, captions from tokens."""

import base64
import io
from pathlib import Path

from PIL import Image

from clipscale.common import files
from clipscale.data.loader.host_batch import HostBatch
from clipscale.models.tokenizer import Tokenizer

SHEET = "samples.html"
"""Its name in the run's folder."""
COUNT = 16


def write_samples(path: Path, batch: HostBatch, tokenizer: Tokenizer) -> None:
    """Write the first samples of a batch that nothing has been read of. Reading it again gives the same pixels."""
    from jinja2 import Template

    samples = []
    for row in range(min(COUNT, len(batch))):
        picture = io.BytesIO()
        pixels = batch.pixels(row, row + 1)[0].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(picture, "WEBP", quality=90)
        tokens = batch.tokens(row * batch.captions, (row + 1) * batch.captions)
        captions = [tokenizer.decoded(caption) for caption in tokens.tolist()]
        samples.append((base64.b64encode(picture.getvalue()).decode(), captions))
    template = Path(__file__).with_name(SHEET).read_text(encoding="utf-8")
    files.write_text(path, Template(template, autoescape=True).render(samples=samples))
