"""Decodes pictures on the GPU (data.decode=gpu), from the bytes in host memory and the crops that were drawn.

Either once, into host memory as they arrive, for both passes; or, with offload=encoded, again for each pass.

C = 3: channels, S: side in pixels.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.data.decode import Crop, TrainTransform, stored_box, upright_steps
from clipscale.data.loader.host_batch import Slot
from clipscale.data.loader.offload import GREY, Recipe, restore
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError
from clipscale.data.shards.access import EVENT

MOST_BYTES = 2**28
"""Device memory for the pictures that are decoded and resized at once; a single picture may take more."""
AHEAD = 256
"""Pictures that the GPU is given at once as they arrive: several for each of its decoding engines."""
REFUSED, GREY_IMAGE = "decoded_by_cpu", "grey_image"
"""Names under which pictures are counted that the GPU's decoder refused, and that no decoder could read."""


def jpeg_decoder(device: torch.device) -> "Torchvision":
    """The decoder of that device, tried on a picture. Raises UserError if the device has none."""
    require_gpu(device)
    sample = np.full((16, 24, 3), (200, 120, 40), np.uint8)
    try:
        decoder = Torchvision(device)
        (found,) = decoder([torch.frombuffer(bytearray(simplejpeg.encode_jpeg(sample)), dtype=torch.uint8)])
        far = (found.cpu().float() - torch.from_numpy(sample).permute(2, 0, 1)).abs().max()
        if found.device.type != device.type or far > 8:
            raise RuntimeError("a picture came out as another")
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data.decode=gpu: torchvision cannot decode JPEGs on {device} ({reason}); take data.decode=fast, or a torchvision with nvJPEG"
        ) from error
    return decoder


def require_gpu(device: torch.device) -> None:
    """Raises UserError if the device is not a GPU."""
    if device.type != "cuda":
        raise UserError(
            f"data.decode=gpu: device={device.type} has no decoder of its own; take data.decode=fast, or exact"
        )


class Torchvision:
    """torchvision's decoder: nvJPEG on a GPU, which blocks until all pictures are decoded."""

    def __init__(self, device: torch.device) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg  # here, since the data workers do not need it

        self.device, self._decode, self._mode = device, decode_jpeg, ImageReadMode.RGB
        # Later torchvisions leave this to TorchCodec; one that lacks it is refused at the start, with a remedy.
        warnings.filterwarnings("ignore", message="The image decoding and encoding", category=DeprecationWarning)

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        """(bytes,) uint8 in host memory to (C, H, W) uint8 RGB on the device. Raises RuntimeError for all if one is refused."""
        if self.device.type == "cuda":
            # It writes on a stream of its own, into memory that this stream may still be reading.
            torch.cuda.current_stream(self.device).synchronize()
        found: list[Tensor] = self._decode(files, mode=self._mode, device=self.device)
        return found


class _Row(NamedTuple):
    """One picture of a chunk: its row in the chunk, and how it is made."""

    number: int
    recipe: Recipe
    crop: Crop


class DeviceDecoder:
    """Decodes image rows of a slot whose pictures are kept as their bytes (backend `device`).

    A picture that the decoder refuses is decoded on the CPU. If that fails too, it is grey, since its place in the batch is already given.
    Both are recorded in the slot, so that the second pass does the same, and counted once.
    """

    def __init__(self, transform: TrainTransform, decoder: Torchvision, counts: Counter[str]) -> None:
        self._transform, self._decoder, self.device, self._counts = transform, decoder, decoder.device, counts
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        """Write the rows from `start` on to host memory. A CUDA stream of its own lets this run beside the computation."""
        with torch.cuda.stream(self._stream):
            torch.from_numpy(out).copy_(self(slot, start, start + len(out)), non_blocking=True)
        if self._stream:
            self._stream.synchronize()

    def __call__(self, slot: Slot, start: int, stop: int) -> Tensor:
        """Rows start..stop of the slot, (stop - start, C, S, S) uint8 on the device, in the order of its current stream."""
        side, recipes = self._transform.side, slot["recipes"][start:stop]
        out = torch.empty((stop - start, 3, side, side), dtype=torch.uint8, device=self.device)
        rows = [_Row(i, Recipe(*numbers[:4]), Crop(*numbers[4:])) for i, numbers in enumerate(recipes.tolist())]
        others = [row for row in rows if not row.recipe.orientation]
        for group in self._groups([row for row in rows if row.recipe.orientation]):
            usable: list[tuple[_Row, Tensor]] = []
            begins = [(row.recipe.begin, row.recipe.begin + row.recipe.size) for row in group]
            pictures = self._decoded([torch.from_numpy(slot["pool"][begin:end]) for begin, end in begins])
            for row, picture in zip(group, pictures):
                # three channels, and the size of its header
                if picture is not None and picture.shape[0] == 3 and picture[0].numel() == row.recipe.area:
                    usable.append((row, picture))
                else:
                    self._counts[EVENT + REFUSED] += 1
                    recipes[row.number] = (*row.recipe._replace(area=0, orientation=0), *row.crop)
                    others.append(row)
            if usable:
                out[self._numbers(row.number for row, _ in usable)] = self._rendered(usable)
        if others:
            restored = torch.from_numpy(self._restored(slot, recipes, others))
            out[self._numbers(row.number for row in others)] = restored.to(self.device, non_blocking=True)
        return out

    def _groups(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Rows that may be decoded at once. A row counts with its pixels in bytes, and the resized ones twice as float32."""
        group: list[_Row] = []
        total = 0
        for row in rows:
            size = 3 * row.recipe.area + 24 * self._transform.side**2
            if group and total + size > MOST_BYTES:
                yield group
                group, total = [], 0
            group.append(row)
            total += size
        if group:
            yield group

    def _decoded(self, files: list[Tensor]) -> list[Tensor | None]:
        """Decoded pictures, None for refused ones. The decoder refuses a whole call for one picture, so a refused call is halved."""
        try:
            return list(self._decoder(files))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # not the picture's fault
        except RuntimeError as error:
            if "out of memory" in str(error):  # torchvision raises a plain RuntimeError
                raise torch.OutOfMemoryError(str(error)) from error
            if len(files) == 1:
                return [None]
            half = len(files) // 2
            return self._decoded(files[:half]) + self._decoded(files[half:])

    def _rendered(self, usable: list[tuple[_Row, Tensor]]) -> Tensor:
        """Cut out, resized, upright, coloured and mirrored. Only the rounding between the two directions differs from the CPU."""
        pixels = torch.cat([self._resized(row, picture) for row, picture in usable])
        pixels = pixels.round_().clamp_(0, 255).to(torch.uint8)
        orientations = [row.recipe.orientation for row, _ in usable]
        for orientation in set(orientations) - {1}:
            chosen = self._numbers(i for i, own in enumerate(orientations) if own == orientation)
            pixels[chosen] = upright(pixels[chosen], orientation)
        if self._transform.colour:
            for i, (row, _) in enumerate(usable):
                if row.crop.colour:
                    pixels[i] = self._transform.colour.changed(pixels[i], CounterRNG(row.crop.colour))
        flipped = self._numbers(i for i, (row, _) in enumerate(usable) if row.crop.flipped)
        if len(flipped):
            pixels[flipped] = pixels[flipped].flip(-1)
        return pixels

    def _resized(self, row: _Row, picture: Tensor) -> Tensor:
        """(1, C, S, S) float32, in the orientation of the file."""
        recipe, crop, side = row.recipe, row.crop, self._transform.side
        height, width = picture.shape[1:]
        if recipe.orientation >= 5:
            height, width = width, height
        left, top, right, bottom = stored_box(crop[:4], recipe.orientation, width, height)
        cut = picture[None, :, top:bottom, left:right].float()
        if cut.shape[2:] == (side, side):
            return cut
        return torch.nn.functional.interpolate(cut, size=(side, side), mode="bicubic", antialias=True)

    def _numbers(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64).to(self.device, non_blocking=True)

    def _restored(self, slot: Slot, recipes: np.ndarray, rows: list[_Row]) -> np.ndarray:
        """(rows, C, S, S) uint8 of rows that are kept as pixels or were refused."""
        side = self._transform.side
        out = np.empty((len(rows), 3, side, side), np.uint8)
        for row, pixels in zip(rows, out):
            try:
                restore(slot, row.recipe, row.crop, self._transform, pixels)
            except BrokenSampleError:
                self._counts[GREY_IMAGE] += 1
                recipes[row.number] = (-1, 0, 0, 0, *row.crop)
                pixels[:] = GREY
        return out


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """(n, C, S, S) from the file's orientation to upright."""
    swapped, down, across = upright_steps(orientation)
    if swapped:
        pixels = pixels.transpose(2, 3)
    return pixels.flip([axis for axis, reverse in ((2, down), (3, across)) if reverse])
