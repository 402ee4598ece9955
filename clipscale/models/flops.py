"""Counts the FLOPs of a model's passes: matrix products alone, 2 per multiply-add. MFU follows from them."""

import json
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from clipscale.common.hardware import HARDWARE, hardware_of
from clipscale.config.model import ModelConfig
from clipscale.models.blocks import two_blocks
from clipscale.models.encoders import Encoders, build_encoders, describe_model
from clipscale.models.towers import ClipModel


class PassFlops(NamedTuple):
    """FLOPs of one input's forward pass by open_clip's own modules, and of its backward pass."""

    forward: int
    backward: int


def trained_names(encoder: nn.Module) -> set[str]:
    """The parameters of a built encoder that train, by open_clip's names.

    An adapter is counted as its layer's bias, which needs the same gradient of the layer's output. The adapter's own
    products are few, and not counted.
    """
    names = {name for name, p in encoder.named_parameters() if p.requires_grad}
    adapted = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    biases = {f"{layer}_bias" if layer.endswith(".attn.in_proj") else f"{layer}.bias" for layer in adapted}
    return {name for name in names if ".lora_" not in name} | biases


def image_flops(config: ModelConfig, trained: Set[str] = frozenset()) -> PassFlops:
    """FLOPs of one image. `config`: the model's settings.

    The backward pass computes what the parameters `trained` need, layer by layer.
    """
    return _image_flops(_settings_key(config), frozenset(trained))


@cache
def _image_flops(model: str, trained: frozenset[str]) -> PassFlops:
    encoder = _encoders(model).visual
    # In a tower that trains whole, the pixels' gradient counts too: three forward passes in all, as usual.
    is_whole = all(name in trained for name, _ in encoder.named_parameters())
    pixels = torch.empty(1, 3, *to_2tuple(encoder.image_size), device="meta", requires_grad=is_whole)
    return _count(encoder, pixels, trained)


def text_flops(config: ModelConfig, trained: Set[str] = frozenset(), length: int | None = None) -> PassFlops:
    """Counts as `image_flops` does, for one caption of `length` tokens, by default the whole context."""
    return _text_flops(_settings_key(config), frozenset(trained), length)


@cache
def _text_flops(model: str, trained: frozenset[str], length: int | None) -> PassFlops:
    encoders = _encoders(model)
    tokens = torch.zeros(1, length or encoders.context_length, dtype=torch.long, device="meta")
    encoder = encoders.text
    if getattr(encoder, "cls_emb", None) is not None:
        return _count(encoder, tokens, trained)
    masks = {name: mask[:length, :length] for name, mask in encoder.named_buffers() if name == "attn_mask"}
    return _count(encoder, tokens, trained, masks)


def decoder_flops(config: ModelConfig, trained: Set[str] = frozenset(), length: int | None = None) -> PassFlops:
    """Counts a captioner's decoder, for the labels of one caption. Its gradient goes on to both towers."""
    return _decoder_flops(_settings_key(config), frozenset(trained), length)


@cache
def _decoder_flops(model: str, trained: frozenset[str], length: int | None) -> PassFlops:
    encoders = _encoders(model)
    pixels = torch.empty(1, 3, *to_2tuple(encoders.visual.image_size), device="meta")
    with torch.no_grad():
        _, image_NPW = encoders.visual(pixels)
    labels = (length or encoders.context_length) - 1
    words_NTW = torch.empty(1, labels, encoders.text.width, device="meta", requires_grad=True)
    return _count(encoders.text_decoder, (image_NPW.requires_grad_(), words_NTW), trained)


def unbuilt_encoders(config: ModelConfig) -> Encoders:
    """open_clip's encoders by a model's settings, without values."""
    return _encoders(_settings_key(config))


def _settings_key(config: ModelConfig) -> str:
    """The settings on which an encoder's operations depend, as text by which results are cached."""
    return json.dumps([config.name, config.architecture, config.image_size, config.context_length])


@cache
def _encoders(model: str) -> Encoders:
    name, description, image_size, context = json.loads(model)
    config = ModelConfig(name=name, architecture=description, image_size=image_size, context_length=context)
    with torch.device("meta"):
        return build_encoders(describe_model(config), image_size).eval()


def _count(
    encoder: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    trained: Set[str],
    buffers: Mapping[str, Tensor] = {},
) -> PassFlops:
    """The FLOPs of a pass, which runs on the meta device. `buffers`: replace buffers of the encoder, by name."""
    for name, p in encoder.named_parameters():
        p.requires_grad_(name in trained)
    counter = ProductCounter()
    with two_blocks(encoder) as (block, times), ExitStack() as hooks:
        if block:
            hooks.enter_context(block.register_forward_pre_hook(partial(counter.count_each, times)))
            hooks.enter_context(block.register_forward_hook(partial(counter.count_each, 1)))
        with counter, torch.enable_grad():
            functional_call(encoder, dict(buffers), inputs if isinstance(inputs, tuple) else (inputs,))
    return PassFlops(counter.forward, counter.backward)


class ProductCounter(TorchDispatchMode):
    """Counts the products of a forward pass, and of the backward pass that follows from it.

    The gradient of each operand that needs one costs as much as the product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0
        # How often each product counts.
        self.times = 1

    def count_each(self, times: int, *_: object) -> None:
        """From now on, count each product this many times. It is a hook of a module."""
        self.times = times

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default:  # a tower of transformers asks whether there is padding
            return False
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            flops = self.times * formula(*args, **(kwargs or {}), out_val=result)
            operands = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim > 1 and arg.requires_grad]
            self.forward += flops
            self.backward += flops * min(2, len(operands))  # attention has three operands and two products
        return result


@dataclass(frozen=True)
class Flops:
    """FLOPs of one training sample: a forward and a backward pass of each tower, and of a decoder that trains.

    The gradient cache's second forward pass is overhead and not counted, so MFU compares with plain training.
    """

    # FLOPs of both passes of an image.
    image_flops: int
    # Number of tokens -> FLOPs of both passes of a caption computed at that width, in the text tower and the decoder;
    # None: the whole context.
    text_flops_at: Callable[[int | None], int]
    # The device's FLOP/s, if known.
    peak: float | None
    # Captions and hard negatives of a sample.
    texts_per_sample: int = 1

    @staticmethod
    def of_model(config: ModelConfig, model: ClipModel, device: torch.device, texts_per_sample: int = 1) -> "Flops":
        """The FLOPs of a model built by `config`. Its parameters say what trains. `texts_per_sample`: see the field."""
        trained = trained_names(model.text.encoder)
        decoder_trained = set() if model.decoder is None else trained_names(model.decoder)

        def caption_flops(width: int | None) -> int:
            decoder = sum(decoder_flops(config, decoder_trained, width)) if decoder_trained else 0
            return sum(text_flops(config, trained, width)) + decoder

        gpu = hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return Flops(
            image_flops=sum(image_flops(config, trained_names(model.image.encoder))),
            text_flops_at=cache(caption_flops),
            peak=HARDWARE[gpu].peak("bf16") if gpu else None,
            texts_per_sample=texts_per_sample,
        )

    def per_sample(self, widths: Mapping[int, int] | None = None) -> float:
        """FLOPs of a sample. `widths`: tokens at which captions are computed -> captions; None: the whole context."""
        if not widths:
            return self.image_flops + self.texts_per_sample * self.text_flops_at(None)
        text = sum(count * self.text_flops_at(width) for width, count in widths.items())
        return self.image_flops + self.texts_per_sample * text / sum(widths.values())

    def utilisation(self, samples_per_s: float, widths: Mapping[int, int] | None = None) -> float | None:
        """MFU: samples_per_s (per device) x FLOPs per sample / peak. None where the device's peak is not known."""
        return None if self.peak is None else samples_per_s * self.per_sample(widths) / self.peak
