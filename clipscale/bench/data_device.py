"""What the data benchmark measures on a GPU: what its decoder gives (data.decode=gpu), what the loaders do for it, what a model takes."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice

import torch

from clipscale.bench.figures import device_of
from clipscale.data.decode import TrainTransform
from clipscale.data.loader.gpu_decode import AHEAD, DecodedAhead, DeviceDecoder, jpeg_decoder
from clipscale.data.loader.host_batch import Arena, Layout
from clipscale.data.loader.offload import tier_of
from clipscale.data.order import AUGMENT, CounterRNG
from clipscale.errors import UserError

WAYS = 4
"""Times that the device is given AHEAD pictures in one measurement."""
CHUNK = 1024
"""Samples of a chunk of the model's step."""


def usable(setting: str) -> tuple[torch.device | None, str]:
    """The device that decodes, by `auto`, `cuda` or `cpu`; or None, and why there is none. Raises UserError for `cuda` without one."""
    if device_of(setting) == "cpu":
        return None, "asked for with device=cpu" if setting == "cpu" else "torch finds no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        jpeg_decoder(device)
    except UserError as error:
        return None, str(error)
    return device, ""


class Batch:
    """AHEAD pictures as the loaders leave them for the device."""

    def __init__(self, files: list[bytes], transform: TrainTransform) -> None:
        self.files, self._transform = list(islice(cycle(files), AHEAD)), transform
        side = transform.side
        self.layout = Layout(
            1,
            AHEAD,
            (3, side, side),
            1,
            tier="device",
            decoded=True,
            pool=sum(map(len, self.files)) + AHEAD * 3 * side**2,
        )
        self.arena = Arena(self.layout)
        self.slot = self.arena.slots[0]
        self._tier = tier_of(self.arena, transform, (0, AHEAD))
        self.fill(0)

    def fill(self, number: int) -> None:
        """Put every picture into its place: what a loader does. `number` makes the crops others."""
        self._tier.begin(self.slot)
        for place, data in enumerate(self.files):
            self._tier.put(self.slot, place, data, CounterRNG(0, AUGMENT, number + place))


def loader_rates(files: list[bytes], transform: TrainTransform, repeats: int) -> list[float]:
    """Pictures a second of one core: bytes in memory to bytes in the batch, with the header read and the crop drawn. CPU time."""
    batch, rates = Batch(files, transform), []
    for round_ in range(repeats + 1):
        begun = time.process_time()
        batch.fill(round_ * AHEAD)
        rates.append(AHEAD / (time.process_time() - begun))
    batch.arena.close()
    return rates[1:]


def device_rates(files: list[bytes], transform: TrainTransform, repeats: int, device: torch.device) -> list[float]:
    """Pictures a second of the device: bytes in host memory to pixels in host memory, wall clock."""
    batch, counts = Batch(files, transform), Counter[str]()
    if device.type == "cuda":
        batch.arena.pin()
    ahead = DecodedAhead(DeviceDecoder(transform, jpeg_decoder(device), counts, counts), batch.arena.window)
    rates = []
    try:
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            for step in range(WAYS):
                ahead.arrived(step, batch.slot, AHEAD, AHEAD)
            for step in range(WAYS):
                ahead.rows(step, 0, AHEAD)
                ahead.forget(step)
            rates.append(WAYS * AHEAD / (time.perf_counter() - begun))
    finally:
        ahead.close()
        batch.arena.close()
    if counts:
        raise RuntimeError(f"the device refused pictures of the benchmark: {dict(counts)}")
    return rates[1:]


def step_rates(model: str, batch: int, repeats: int, device: torch.device) -> list[float]:
    """Samples a second that the gradient cache takes with that preset in bf16, pixels and tokens on the device; no update of weights."""
    from clipscale.bench.step_ways import model_config
    from clipscale.config.sections import PrecisionConfig
    from clipscale.grad_cache import GradCache
    from clipscale.loss.api import contrastive_loss
    from clipscale.models.towers import build_model
    from clipscale.precision import Precision

    built = build_model(model_config(model)).to(device)
    cache = GradCache(
        [built.image, built.text],
        lambda u, v: contrastive_loss(u, v, built.logit_scale.exp(), check=False),
        chunks=min(CHUNK, batch),
        autocast=Precision(PrecisionConfig(name="bf16"), device).autocast,
    )
    side = built.image_size
    pixels = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8, device=device)
    tokens = torch.randint(1, 49406, (batch, built.context_length), dtype=torch.int32, device=device)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rates = []
    for _ in range(repeats + 1):
        wait()
        begun = time.perf_counter()
        cache.step(pixels, tokens)
        wait()
        rates.append(batch / (time.perf_counter() - begun))
    return rates[1:]
