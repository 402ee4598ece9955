"""Decodes pictures on the GPU (data.decode=gpu), from the bytes in host memory and the crops that were drawn.

Either once, by a thread, into host memory as they arrive, for both passes; or, with offload=encoded, again for each pass.

C = 3: channels, S: side in pixels.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from clipscale.data.decode import Crop, TrainTransform, stored_box, upright_steps
from clipscale.data.loader.host_batch import RowSource, Slot, Stopwatch
from clipscale.data.loader.offload import Recipe, restore
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError
from clipscale.errors import UserError

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
        found = decoder([torch.frombuffer(bytearray(simplejpeg.encode_jpeg(sample)), dtype=torch.uint8)])[0]
        if (
            found.device.type != device.type
            or (found.cpu().float() - torch.from_numpy(sample).permute(2, 0, 1)).abs().max() > 8
        ):
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


@dataclass
class _Row:
    """One picture of a chunk."""

    number: int
    """Its row in the chunk."""
    place: int
    recipe: Recipe
    crop: Crop


class DeviceDecoder:
    """Decodes image rows of a slot whose pictures are kept as their bytes (backend `device`).

    A picture that the decoder refuses is decoded on the CPU. If that fails too, it is grey, since its place in the batch is already given.
    Both are recorded in the slot, so that the second pass does the same, and counted once: in `seen` and in `broken`.
    """

    def __init__(
        self, transform: TrainTransform, decoder: Torchvision, broken: Counter[str], seen: Counter[str]
    ) -> None:
        self._transform, self._decoder, self.device = transform, decoder, decoder.device
        self._broken, self._seen = broken, seen

    def __call__(self, slot: Slot, start: int, stop: int) -> Tensor:
        """Rows start..stop of the slot, (stop - start, C, S, S) uint8 on the device, in the order of its current stream."""
        side = self._transform.side
        out = torch.empty((stop - start, 3, side, side), dtype=torch.uint8, device=self.device)
        rows = [
            _Row(number, start + number, Recipe(*numbers[:4]), Crop(*numbers[4:]))
            for number, numbers in enumerate(slot["recipes"][start:stop].tolist())
        ]
        refused: list[_Row] = []
        for group in self._groups([row for row in rows if row.recipe.orientation]):
            usable: list[tuple[_Row, Tensor]] = []
            for row, picture in zip(group, self._decoded([self._bytes(slot, row.recipe) for row in group])):
                if picture is not None and fits(picture, row.recipe):
                    usable.append((row, picture))
                else:
                    refused.append(row)
            if usable:
                numbers = self._numbers(row.number for row, _ in usable)
                out[numbers] = self._rendered([row for row, _ in usable], [picture for _, picture in usable])
        for row in refused:
            self._seen[REFUSED] += 1
            slot["recipes"][row.place] = (*row.recipe._replace(area=0, orientation=0), *row.crop)
        others = [row for row in rows if not row.recipe.orientation] + refused
        if others:
            numbers = self._numbers(row.number for row in others)
            out[numbers] = torch.from_numpy(self._restored(slot, others)).to(self.device, non_blocking=True)
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

    def _bytes(self, slot: Slot, recipe: Recipe) -> Tensor:
        return torch.from_numpy(slot["pool"][recipe.begin : recipe.begin + recipe.size])

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

    def _rendered(self, rows: list[_Row], pictures: list[Tensor]) -> Tensor:
        """Cut out, resized, upright, coloured and mirrored. Only the rounding between the two directions differs from the CPU."""
        pixels = torch.cat([self._resized(row, picture) for row, picture in zip(rows, pictures)])
        pixels = pixels.round_().clamp_(0, 255).to(torch.uint8)
        for orientation in {row.recipe.orientation for row in rows} - {1}:
            turned = self._numbers(i for i, row in enumerate(rows) if row.recipe.orientation == orientation)
            pixels[turned] = upright(pixels[turned], orientation)
        if self._transform.colour:
            for i, row in enumerate(rows):
                if row.crop.colour:
                    pixels[i] = self._transform.colour.changed(pixels[i], CounterRNG(row.crop.colour))
        if any(row.crop.flipped for row in rows):
            flipped = self._numbers(i for i, row in enumerate(rows) if row.crop.flipped)
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

    def _numbers(self, numbers: Iterator[int]) -> Tensor:
        return torch.tensor(list(numbers)).to(self.device, non_blocking=True)

    def _restored(self, slot: Slot, rows: list[_Row]) -> np.ndarray:
        """(rows, C, S, S) uint8 of rows that are kept as pixels or were refused."""
        side = self._transform.side
        out = np.empty((len(rows), 3, side, side), np.uint8)
        for row, place in zip(rows, out):
            recipe = Recipe(*slot["recipes"][row.place][:4].tolist())
            try:
                restore(slot, recipe, row.crop, self._transform, place)
            except BrokenSampleError:
                self._broken[GREY_IMAGE] += 1
                recipe = Recipe(-1, 0)
                slot["recipes"][row.place] = (*recipe, *row.crop)
                restore(slot, recipe, row.crop, self._transform, place)
        return out


class DecodeOnRequest(RowSource):
    """Decodes a batch's image rows whenever they are asked for, on the device's current stream."""

    def __init__(self, decode: DeviceDecoder) -> None:
        self._decode = decode

    def open(self, step: int, slot: Slot) -> None:
        self._slot = slot

    def rows(self, start: int, stop: int) -> Tensor:
        return self._decode(self._slot, start, stop)


_Piece = tuple[int, int, Future[None]]
"""Rows start..stop that the device is given at once, and their decoding."""


class DecodePrefetcher(RowSource):
    """Image rows in host memory: a thread lets the device decode them as they arrive, in order, of this batch and the following ones.

    So the device decodes the next batch while it computes on this one, and both passes use the same pixels.
    """

    follows_arrivals = True

    def __init__(self, decode: DeviceDecoder, rows: np.ndarray, waited: Stopwatch) -> None:
        """`rows`: (slots, N, C, S, S) uint8, page-locked if copies are to overlap with computation."""
        self._decode, self._decoded, self._waited = decode, torch.from_numpy(rows), waited
        self._stream = torch.cuda.Stream(decode.device) if decode.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "decode")
        self._begun: dict[int, tuple[Slot, list[_Piece]]] = {}
        """Step -> its slot and the pieces begun."""
        self._step = -1

    def open(self, step: int, slot: Slot) -> None:
        self._step = step
        self._begun.setdefault(step, (slot, []))

    def arrived(self, step: int, slot: Slot, count: int, size: int) -> None:
        """Begin to decode the arrived rows that are not begun yet, in whole pieces."""
        _, begun = self._begun.setdefault(step, (slot, []))
        while (ready := begun[-1][1] if begun else 0) < size and min(ready + AHEAD, size) <= count:
            self._begin(step, min(ready + AHEAD, size))

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, C, S, S) uint8, a view; blocks until they are decoded. They must have arrived."""
        slot, begun = self._begun[self._step]
        with self._waited:
            while (ready := begun[-1][1] if begun else 0) < stop:
                self._begin(self._step, min(ready + AHEAD, stop))
            for first, last, done in begun:
                if start < last and first < stop:
                    done.result()
        return self._decoded[slot.number, start:stop]

    def release(self, step: int) -> None:
        _, begun = self._begun.pop(step, (None, []))
        for _, _, done in begun:
            done.result()

    def close(self) -> None:
        """End the thread after its current piece."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(self, step: int, stop: int) -> None:
        slot, begun = self._begun[step]
        start = begun[-1][1] if begun else 0
        begun.append((start, stop, self._thread.submit(self._load, slot, start, stop)))

    def _load(self, slot: Slot, start: int, stop: int) -> None:
        with torch.cuda.stream(self._stream):
            self._decoded[slot.number, start:stop].copy_(self._decode(slot, start, stop), non_blocking=True)
        if self._stream:
            self._stream.synchronize()


def fits(picture: Tensor, recipe: Recipe) -> bool:
    """Whether a picture has three channels and the size of its header."""
    return picture.shape[0] == 3 and picture.shape[1] * picture.shape[2] == recipe.area


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """(n, C, S, S) from the file's orientation to upright."""
    swapped, down, across = upright_steps(orientation)
    if swapped:
        pixels = pixels.transpose(2, 3)
    return pixels.flip([axis for axis, reverse in ((2, down), (3, across)) if reverse])
