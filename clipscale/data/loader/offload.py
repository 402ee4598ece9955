"""How one sample's image row is stored in the batch until both passes have used it, and how it is loaded.

`host` stores pixels. `encoded` stores the picture's own bytes and the
crop that was drawn, and decodes them chunk by chunk, again for each pass: the same bytes and crop give the same pixels.
"""

import numpy as np

from clipscale.data.decode import Crop, Picture
from clipscale.data.loader.host_batch import Arena, Slot
from clipscale.data.order import CounterRNG


class PixelBackend:
    """One process's access to the image rows of an arena.

    With `encoded`, pictures are stored as their bytes, at the beginning of their rows: memory is used only where it is
    written to. A slot's `recipes` hold the number of a picture's bytes and its crop. A picture with more bytes than
    pixels is stored as pixels, with 0 for the number of bytes.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._transform = arena.layout.columns.images
        self._encoded = arena.layout.backend == "encoded"
        self._row = np.empty(self._transform.shape, np.uint8)

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        """Store a sample. Raises BrokenSampleError before anything is written."""
        row = slot["rows"][place]
        if not self._encoded:
            self._transform(data, rng, row)
            return
        picture = Picture(data, self._transform.max_pixels)
        crop = self._transform.crop(picture, rng)
        # Decoded here already, so that a broken picture is skipped as with `host`.
        decoded = picture.decode()
        size = len(data)
        if size < row.nbytes:
            row.reshape(-1)[:size] = np.frombuffer(data, np.uint8)
        else:
            self._transform.render(decoded, crop, row)
            size = 0
        slot["recipes"][place] = (size, *crop)

    def check(self, data: bytes, rng: CounterRNG) -> None:
        """Raise BrokenSampleError where `put` does, but store nothing."""
        self._transform(data, rng, self._row)

    def load(self, number: int, start: int, stop: int, at: int) -> None:
        """Decode the pictures in rows start..stop of a slot, by its number, to place `at` of the buffers."""
        slot = self._arena.slots[number]
        recipes = slot["recipes"][start:stop].tolist()
        for pixels, row, (size, *numbers) in zip(self._arena.buffers[at:], slot["rows"][start:stop], recipes):
            if size:
                picture = Picture(row.reshape(-1)[:size].tobytes(), self._transform.max_pixels)
                self._transform.render(picture.decode(), Crop(*numbers), pixels)
            else:
                np.copyto(pixels, row)
