"""The shorter forward pass gives open_clip's features and gradients, from open_clip's parameters."""

from copy import deepcopy
from typing import Any

import open_clip
import pytest
import torch
from open_clip.model import CustomTextCLIP
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from clipscale.models.lean import LeanPatches, LeanText, LeanVision, embed_patches_by_product, lean_encoder
from tests.support.gradients import gradients
from tests.support.towers import architecture

SIDE = 12
WORDS = 9
VOCABULARY = 60
SMALL = architecture(SIDE, 6, WORDS, VOCABULARY)
SIZES = ("size", "layers", "width", "length", "heads", "ratio")
NAMES = ("timm_", "hf_", "tokenizer_")
IMAGE_OPTIONS = {"final_ln_after_pool", "ls_init_value", "no_ln_pre", "pool_type", "pos_embed_type"}
# Towers with these have the shorter forward pass; with others that newer versions of open_clip have, perhaps.
TEXT_OPTIONS = {"act_kwargs", "eos_id", "ls_init_value", "no_causal_mask", "norm_kwargs", "pool_type", "proj_bias",
                "proj_type"}  # fmt: skip


def described(image: dict[str, Any], text: dict[str, Any], **top: Any) -> dict[str, Any]:
    return SMALL | top | {"vision_cfg": SMALL["vision_cfg"] | image, "text_cfg": SMALL["text_cfg"] | text}


def options(part: dict[str, Any]) -> dict[str, Any]:
    """A registered description's settings that change what is computed, and not only how large it is."""
    return {key: value for key, value in part.items() if not key.endswith(SIZES) and not key.startswith(NAMES)}


def kinds() -> list[dict[str, Any]]:
    """Every combination of options among the registered architectures of open_clip's own towers, at a small size.

    Only models of pictures and texts: newer versions of open_clip have others.
    """
    small = []
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        if "multimodal_cfg" in config or not {"vision_cfg", "text_cfg"} <= config.keys():
            continue
        image = config["vision_cfg"]
        text = config["text_cfg"]
        image_options = {} if "timm_model_name" in image or isinstance(image.get("layers"), list) else options(image)
        text_options = {} if "hf_model_name" in text else options(text)
        kind = described(image_options, text_options, quick_gelu=config.get("quick_gelu", False))
        if kind not in small:
            small.append(kind)
    return small


UNREGISTERED = [
    described({}, {"pool_type": "first", "no_causal_mask": True}),
    described({"ls_init_value": 0.3}, {"pool_type": "last", "ls_init_value": 0.3}),
    described({"pos_embed_type": "sin_cos_2d", "pool_type": "avg"}, {"pool_type": "none"}),
    described({}, {"pool_type": "eos", "eos_id": 2, "no_causal_mask": True}),
]


def inputs(samples: int = 5) -> tuple[Tensor, Tensor]:
    """Pixels, and captions of all lengths: words, the end (the highest number, and number 2), padding."""
    pixels = torch.randn(samples, 3, SIDE, SIDE, dtype=torch.float64)
    tokens = torch.randint(3, VOCABULARY - 1, (samples, WORDS))
    for row, caption in enumerate(tokens):
        end = WORDS - 1 - row % 4
        caption[end] = VOCABULARY - 1
        caption[end - 1] = 2
        caption[end + 1 :] = 0
    return pixels, tokens


def both(description: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[CustomTextCLIP, CustomTextCLIP]:
    """open_clip's model, and the same one with the shorter forward pass in the towers that it claims."""
    torch.manual_seed(0)
    reference = CustomTextCLIP(**description).to(dtype)
    ours = deepcopy(reference)
    ours.visual = lean_encoder(ours.visual)
    ours.text = lean_encoder(ours.text)
    assert list(ours.state_dict()) == list(reference.state_dict())
    return reference, ours


def both_passes(tower: nn.Module, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The features of a tower, and its gradients by name."""
    torch.manual_seed(1)
    features = tower(rows)
    features.backward(torch.randn_like(features))
    return features.detach(), gradients(tower)


def assert_same(reference: CustomTextCLIP, ours: CustomTextCLIP) -> None:
    for tower, rows in zip(("visual", "text"), inputs()):
        (expected, wanted_gradients), (features, by_name) = (
            both_passes(getattr(m, tower), rows) for m in (reference, ours)
        )
        error = ((features - expected).norm() / expected.norm()).item()
        assert error <= 1e-12, f"features differ by {error:.1e}"
        assert by_name.keys() == wanted_gradients.keys()
        largest = max(gradient.norm() for gradient in wanted_gradients.values())
        for name, gradient in wanted_gradients.items():
            # The keys' bias moves no score, so its gradient is rounding alone; hence the floor.
            error = ((by_name[name] - gradient).norm() / gradient.norm().clamp_min(1e-2 * largest)).item()
            assert error <= 1e-12, f"{name}: {error:.1e}"


@pytest.mark.parametrize("description", kinds() + UNREGISTERED, ids=str)
def test_every_kind_has_open_clips_features_and_gradients(description: dict[str, Any]) -> None:
    reference, ours = both(description)
    assert isinstance(ours.visual, LeanVision) or not options(description["vision_cfg"]).keys() <= IMAGE_OPTIONS
    assert isinstance(ours.text, LeanText) or not options(description["text_cfg"]).keys() <= TEXT_OPTIONS
    assert_same(reference, ours)


def test_patch_dropout_and_checkpointing_draw_and_compute_the_same() -> None:
    reference, ours = both(described({"patch_dropout": 0.5}, {}))
    for model in (reference, ours):
        model.set_grad_checkpointing(True)
    assert_same(reference, ours)


def test_checkpointing_recomputes_captions_by_the_kernel_of_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses the backward pass if another kernel has saved other tensors."""
    monkeypatch.setattr("clipscale.models.lean.CAPTION_SDPA_BACKENDS", [SDPBackend.MATH])
    ours = both(SMALL)[1]
    ours.set_grad_checkpointing(True)
    ours.text(inputs()[1]).sum().backward()


def test_a_cut_caption_has_the_feature_of_the_whole_one() -> None:
    reference, ours = both(SMALL)
    tokens = inputs()[1][3:4]
    cut = tokens[:, : int(tokens.argmax()) + 1]
    assert cut.shape[1] < WORDS
    assert torch.allclose(ours.text(cut), reference.text(tokens), rtol=0, atol=1e-13)


def test_bf16_is_as_near_to_float64_as_open_clips() -> None:
    """Under autocast the distance is at most twice open_clip's own, and never more than a percent."""
    reference, ours = both(SMALL, torch.float32)
    for tower, rows in zip(("visual", "text"), inputs(32)):
        truth = deepcopy(getattr(reference, tower)).double()(rows)
        error = {}
        for name, model in (("reference", reference), ("ours", ours)):
            with torch.autocast("cpu", torch.bfloat16):
                features = getattr(model, tower)(rows.float() if rows.is_floating_point() else rows)
            error[name] = ((features.double() - truth).norm() / truth.norm()).item()
        assert error["ours"] <= min(2 * error["reference"], 0.01), error


def test_other_towers_keep_their_own_forward() -> None:
    for description in (
        described({"qk_norm": True}, {"qk_norm": True}),
        described({"attentional_pool": True, "attn_pooler_heads": 2}, {"embed_cls": True}),
    ):
        reference, ours = both(description)
        assert (type(ours.visual), type(ours.text)) == (type(reference.visual), type(reference.text))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(12, 12), (13, 10)])
def test_patches_by_a_matrix_product_are_those_of_the_convolution(size: tuple[int, int], bias: bool) -> None:
    """Pixels beyond the last whole patch are left out by both."""
    encoder = nn.Sequential(nn.Conv2d(3, 7, 4, 4, bias=bias)).double()
    pixels = torch.randn(2, 3, *size, dtype=torch.float64)
    required = encoder(pixels)
    upstream = torch.randn_like(required)
    gradients = torch.autograd.grad(required, list(encoder.parameters()), upstream)
    embed_patches_by_product(encoder)
    patches = encoder[0]
    assert isinstance(patches, LeanPatches)
    actual = patches.product(pixels)
    torch.testing.assert_close(actual, required, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(actual, list(encoder.parameters()), upstream), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_only_convolutions_without_overlap_are_replaced() -> None:
    for convolutions in ([nn.Conv2d(3, 4, 3, 2)], [nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 4, 2, 2)]):
        encoder = nn.Sequential(*convolutions)
        embed_patches_by_product(encoder)
        assert list(encoder) == convolutions
