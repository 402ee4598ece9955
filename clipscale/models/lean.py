"""A shorter forward pass for open_clip's own transformers: the same parameters and features, with less work.

Each class `Lean...` is open_clip's class of that name without the work that changes no feature:

- Queries, keys and values are views of one projection, which `scaled_dot_product_attention` takes without a copy.
- A causal mask is a flag, not a matrix, and follows the length of the captions.
- The last block computes the pooled token alone. Of all other tokens it needs the keys and values.
- A captioner's text tower gives the class token behind the caption its own position, whatever the caption's length. So
  a caption without its padding has the same feature.
- On a GPU, patches are embedded by a matrix product: cuDNN has no fast convolution for three channels.
- Under autocast, layer norms of half-precision values read and write these. Autocast by itself would make float32
  copies of both.
- A text tower of transformers computes no copy of its tokens beside the feature.

N: samples, T: tokens, W: width, H: heads.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import (
    LayerNorm,
    MultimodalTransformer,
    ResidualAttentionBlock,
    TextTransformer,
    Transformer,
    VisionTransformer,
    text_global_pool,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from clipscale.common.half_precision import CastLayer
from clipscale.models.linear import CastLinear, Replacement, linear

# Kernels of attention over captions. The first that can is used. On an H100 (torch 2.11) 77 tokens take 0.45 ms by
# flash attention and 0.55 by cuDNN's, which also prepares itself for every new shape. The 197 and 257 tokens of images
# are faster by cuDNN's.
CAPTION_SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# The position of a token: one for all samples, or one for each, (N,).
TokenIndex = int | Tensor
# A mask of attention. False: none. True: a causal mask. Bool (N, 1, T, T): the tokens that a token attends to.
AttentionMask = bool | Tensor


def lean_encoder(encoder: nn.Module) -> nn.Module:
    """The encoder with the shorter forward pass, over the same parameters. Any other encoder is returned as it is."""
    if type(encoder) is HFTextEncoder and not encoder.output_tokens:
        return LeanHuggingFace(encoder)
    lean_class = lean_class_for(encoder)
    if lean_class is None:
        return encoder
    transformer: Any = encoder if lean_class is LeanDecoder else encoder.transformer
    blocks = transformer.resblocks
    if not all(type(block) is ResidualAttentionBlock and not hasattr(block, "ln_1_kv") for block in blocks):
        return encoder
    for i, block in enumerate(blocks):
        blocks[i] = LeanBlock(block)
        block.attn.out_proj = CastLinear(block.attn.out_proj)
    for name, module in list(encoder.named_modules()):
        if type(module) is LayerNorm:
            encoder.set_submodule(name, LeanNorm(module))
    return lean_class(encoder)


def lean_class_for(encoder: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    """The class here for an encoder of this type with these settings; None if there is none."""
    if type(encoder) is VisionTransformer:
        if encoder.attn_pool is None:
            return None if encoder.output_tokens else LeanVision
        return LeanPooledVision if encoder.attn_pool_contrastive is None and encoder.output_tokens else None
    if type(encoder) is TextTransformer:
        if encoder.cls_emb is None:
            return None if encoder.use_pad_mask or encoder.output_tokens else LeanText
        return LeanCaptions if encoder.attn_mask is not None and encoder.output_tokens else None
    return LeanDecoder if type(encoder) is MultimodalTransformer else None


class LeanBlock(Replacement, CastLayer, ResidualAttentionBlock):
    """open_clip's block over (N, T, W)."""

    def forward(self, x: Tensor, mask: AttentionMask, position: TokenIndex | None = None) -> Tensor:
        """(N, T, W) -> (N, T, W). With `position` the output of that token alone, (N, W); then `mask` is a bool."""
        y = self.ln_1(x)
        if position is None:
            attended = self.attend(y, mask)
        else:
            attended = self.attend_from(y, position, mask is True)
            x = select_token(x, position)
        x = x + self.ls_1(self.attn.out_proj(attended))
        return x + self.ls_2(self.mlp(self.ln_2(x)))

    def attend(self, y: Tensor, mask: AttentionMask) -> Tensor:
        """Attention from every token (N, T, W), before the output's projection."""
        q, k, v = self.heads(self.project(y), 3)
        matrix = mask if isinstance(mask, Tensor) else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=matrix, is_causal=mask is True)
        return out.transpose(1, 2).reshape(y.shape)

    def attend_from(self, y: Tensor, position: TokenIndex, causal: bool) -> Tensor:
        """Attention from one token of each sample to all, or to those up to it: (N, W)."""
        samples, length, width = y.shape
        mask = None
        if causal:
            if isinstance(position, int):
                y = y[:, : position % length + 1]
            else:
                mask = (torch.arange(length, device=y.device) <= position[:, None])[:, None, None]
        query, keys_and_values = self.project_from(select_token(y, position)[:, None], y)
        (q,) = self.heads(query, 1)
        k, v = self.heads(keys_and_values, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(samples, width)

    def project(self, y: Tensor) -> Tensor:
        """Queries, keys and values of every token: (N, T, W) -> (N, T, 3 W)."""
        return linear(y, *self.weights(), self.half_weights)

    def project_from(self, token: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The query of one token (N, 1, W), and keys and values of every token (N, T, 2 W)."""
        width = y.shape[-1]
        query_weight, other_weights = self.attn.in_proj_weight.split([width, 2 * width])
        query_bias, other_biases = self.attn.in_proj_bias.split([width, 2 * width])
        return F.linear(token, query_weight, query_bias), F.linear(y, other_weights, other_biases)

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the packed projection. `project_from` uses parts of them."""
        return self.attn.in_proj_weight, self.attn.in_proj_bias

    def heads(self, projected: Tensor, count: int) -> tuple[Tensor, ...]:
        """(N, T, count * W) -> `count` views (N, H, T, W / H).

        Split before they are transposed: the backward pass then joins their gradients in the projection's layout.
        """
        samples, length, _ = projected.shape
        views = projected.view(samples, length, count, self.attn.num_heads, -1).unbind(dim=2)
        return tuple(view.transpose(1, 2) for view in views)


class LeanNorm(Replacement, LayerNorm):
    """open_clip's layer norm: mean and variance in float32; on a GPU, gain and bias in the input's half precision."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.bfloat16, torch.float16):
            return super().forward(x)
        gain = self.weight
        bias = self.bias
        if x.device.type != "cpu":
            gain = None if gain is None else gain.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, gain, bias, self.eps)


class LeanPatches(Replacement, nn.Conv2d):
    """A convolution with windows that do not overlap, over (N, C, H, W). C: channels, P: side of a window."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if x.is_cuda else super().forward(x)

    def product(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, W, H / P, W / P), the transposed rows of one matrix product."""
        side_h, side_w = self.kernel_size
        rows = x.shape[2] // side_h
        columns = x.shape[3] // side_w
        x = x[:, :, : rows * side_h, : columns * side_w]
        x = x.unflatten(3, (columns, -1)).unflatten(2, (rows, -1)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(x, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def embed_patches_by_product(encoder: nn.Module) -> None:
    """Replace an encoder's convolution by `LeanPatches`, where it is the only one and its windows do not overlap."""
    convolutions = [(name, module) for name, module in encoder.named_modules() if isinstance(module, nn.Conv2d)]
    if len(convolutions) == 1:
        name, patches = convolutions[0]
        if (
            type(patches) is nn.Conv2d
            and patches.stride == patches.kernel_size
            and patches.padding in ((0, 0), "valid")
        ):
            encoder.set_submodule(name, LeanPatches(patches))


class LeanVision(Replacement, VisionTransformer):
    """An image tower: pixels (N, 3, S, S) -> features (N, D)."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = run_blocks(self.transformer, self.embed(x), False, 0 if self.pool_type == "tok" else None)
        pooled = self.pool(x) if self.pool_type == "avg" else self.ln_post(x)
        return pooled if self.proj is None else pooled @ self.proj

    def embed(self, pixels: Tensor) -> Tensor:
        """The class token and the patches, with their positions, less what patch dropout leaves out: (N, T, W)."""
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.view(1, 1, -1).expand(len(patches), -1, -1)
        tokens = torch.cat([first.to(patches.dtype), patches], dim=1)
        return self.ln_pre(self.patch_dropout(tokens + self.positional_embedding.to(patches.dtype)))

    def pool(self, tokens: Tensor) -> Tensor:
        """The mean of all tokens but the class token, normalised before or afterwards: (N, T, W) -> (N, W)."""
        if self.final_ln_after_pool:
            return self.ln_post(tokens[:, 1:].mean(dim=1))
        return self.ln_post(tokens)[:, 1:].mean(dim=1)


class LeanPooledVision(LeanVision):
    """A captioner's image tower: pixels (N, 3, S, S) -> features (N, D), and tokens (N, P, W) for its decoder."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        queried = self.ln_post(self.attn_pool(run_blocks(self.transformer, self.embed(x), False, None)))
        pooled = queried[:, 1:].mean(dim=1) if self.pool_type == "avg" else queried[:, 0]
        return pooled if self.proj is None else pooled @ self.proj, queried[:, 1:]


class LeanText(Replacement, TextTransformer):
    """A text tower: tokens (N, T) -> features (N, D). T is any length up to the context's."""

    def forward(self, text: Tensor) -> Tensor:
        backend = partial(sdpa_kernel, CAPTION_SDPA_BACKENDS, set_priority=True)
        x = run_blocks(
            self.transformer,
            # A variable would keep this tensor alive while all blocks run.
            self.token_embedding(text) + self.positional_embedding[: text.shape[1]],
            self.attn_mask is not None,
            self.position(text),
            backend,
        )
        x = self.ln_final(x)
        pooled = text_global_pool(x, text, self.pool_type) if x.ndim == 3 else x
        if isinstance(self.text_projection, nn.Linear):
            return self.text_projection(pooled)
        return pooled if self.text_projection is None else pooled @ self.text_projection

    def position(self, text: Tensor) -> TokenIndex | None:
        """The position of the token that becomes the feature; None if all outputs count."""
        if self.pool_type == "argmax":
            return text.argmax(dim=-1)
        if self.pool_type == "eos":
            return (text == self.eos_id).int().argmax(dim=-1)
        return {"first": 0, "last": -1}.get(self.pool_type)


class LeanCaptions(Replacement, TextTransformer):
    """A captioner's text tower: tokens (N, T) -> features (N, D) and the caption's tokens (N, T, W).

    The features come from the class token, which stands behind the caption. T is any length up to the context's.
    Padding changes neither output.
    """

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        length = text.shape[1]
        if length < self.context_length and not self.correct_cls_mask:
            text = F.pad(text, (0, 1), value=self.pad_id)  # the class token attends to the first pad, too
        class_token = self.cls_emb.expand(len(text), 1, -1)
        positions = torch.cat([self.positional_embedding[: text.shape[1]], self.positional_embedding[-1:]])
        x = run_blocks(
            self.transformer,
            # A variable would keep this tensor alive while all blocks run.
            torch.cat([self.token_embedding(text), class_token], dim=1) + positions,
            self.mask(text),
            None,
        )
        pooled = self.ln_final(x[:, -1])
        if isinstance(self.text_projection, nn.Linear):
            pooled = self.text_projection(pooled)
        elif self.text_projection is not None:
            pooled = pooled @ self.text_projection
        return pooled, x[:, :length]

    def mask(self, text: Tensor) -> Tensor:
        """Each token attends to those up to itself, without the pads: (N, 1, T + 1, T + 1) bool.

        Without `correct_cls_mask` the pads' part of the mask is off by one, as when open_clip's own weights were
        trained.
        """
        is_token = text != self.pad_id
        shown = is_token.new_ones(len(text), 1)
        keys = torch.cat([is_token, shown] if self.correct_cls_mask else [shown, is_token], dim=1)
        earlier = keys.new_ones(keys.shape[1], keys.shape[1]).tril()
        return keys[:, None, None] & earlier


class LeanHuggingFace(Replacement, HFTextEncoder):
    """A text tower of transformers: tokens (N, T) -> features (N, D).

    open_clip's forward pass also chooses all tokens but the first by a mask of booleans, for which a GPU is waited for.
    A dry run cannot know how many that are.
    """

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != self.config.pad_token_id).long()
        return self.proj(self.pooler(self.transformer(input_ids=x, attention_mask=mask), mask))


class LeanDecoder(Replacement, MultimodalTransformer):
    """A captioner's decoder: an image's tokens (N, P, W) and a caption's (N, T, W) -> logits (N, T, V).

    With `label_mask`, bool (N, T), the logits of these K tokens alone, (K, V).
    """

    # Whether the caller may pass `label_mask`. A dry run may not: its tensors have no values by which to choose tokens.
    accepts_label_mask = True

    def forward(self, image: Tensor, x: Tensor, label_mask: Tensor | None = None) -> Tensor:
        for block, cross in zip(self.resblocks, self.cross_attn, strict=True):
            if self.grad_checkpointing:
                x = checkpoint(block, x, True, use_reentrant=False)
                x = checkpoint(cross, x, image, image, use_reentrant=False)
            else:
                x = cross(block(x, True), image, image)
        return self.ln_final(x if label_mask is None else x[label_mask]) @ self.text_projection


def run_blocks(
    transformer: Transformer,
    x: Tensor,
    mask: AttentionMask,
    position: TokenIndex | None,
    backend: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """All blocks over x (N, T, W). With `position` the last one computes that token alone: (N, W). `backend`: chooses
    attention's kernel."""
    last_block = transformer.resblocks[-1]

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """The contexts for a checkpointed block: for its forward pass, and for its recomputation."""
        return nullcontext(), backend()

    with backend():
        for block in transformer.resblocks:
            pooled = position if block is last_block else None
            if transformer.grad_checkpointing:  # the backward pass recomputes the block with the same kernel
                x = checkpoint(block, x, mask, pooled, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x, mask, pooled)
    return x


def select_token(x: Tensor, position: TokenIndex) -> Tensor:
    """One token of each sample: (N, T, W) -> (N, W)."""
    return x[:, position] if isinstance(position, int) else x[torch.arange(len(x), device=x.device), position]
