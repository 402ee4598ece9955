"""The captioner's features, loss and gradients equal open_clip's CoCa in one graph."""

import pytest
import torch
from open_clip.coca_model import CoCa
from open_clip.loss import CoCaLoss
from torch import nn

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.captioner import Captioner, count_caption_labels
from clipscale.models.families import family_of
from clipscale.models.lean import LeanDecoder
from clipscale.models.towers import ClipModel, build_model
from tests.support.gradients import gradients
from tests.support.towers import PIXELS, TOKENS, captioned, captioner_architecture, small_captioner

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def open_clips(model: ClipModel) -> CoCa:
    """open_clip's own module with the model's weights, in float64."""
    theirs = CoCa(**captioner_architecture(PIXELS, 3, TOKENS)).double()
    theirs.visual.load_state_dict(model.image.encoder.state_dict())
    theirs.text.load_state_dict(model.text.encoder.state_dict())
    theirs.text_decoder.load_state_dict(model.decoder.state_dict())
    theirs.logit_scale.data.copy_(model.logit_scale)
    theirs.text.correct_cls_mask = model.text.encoder.correct_cls_mask
    return theirs


@pytest.mark.parametrize("is_lean", [False, True])
@pytest.mark.parametrize("weights", ["new", "given"])
def test_loss_and_gradients_are_open_clips(weights: str, is_lean: bool) -> None:
    """Captions have any length. The mask is that of new weights, or open_clip's."""
    model = small_captioner(is_lean).double()
    assert (type(model.decoder) is LeanDecoder) == is_lean
    model.text.encoder.correct_cls_mask = weights == "new"
    captioner = Captioner(model.image, model.text, model.decoder)
    theirs = open_clips(model)
    pixels, tokens = captioned(9)

    out = theirs(model.image.encoder_inputs(pixels), tokens)
    expected = CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.0)(**out)
    sum(expected).backward()

    image, text, caption_sum = captioner(pixels, tokens)
    caption = caption_sum / count_caption_labels(tokens)
    logits = model.logit_scale.exp() * image @ text.T
    targets = torch.arange(9)
    contrast = (nn.functional.cross_entropy(logits, targets) + nn.functional.cross_entropy(logits.T, targets)) / 2
    (contrast + 2 * caption).backward()

    torch.testing.assert_close(torch.stack([contrast, 2 * caption]), torch.stack(expected), **EXACT)
    ours = gradients(model)
    wanted = gradients(theirs)
    names = {"visual": "image.encoder", "text": "text.encoder", "text_decoder": "decoder"}
    assert len(ours) == len(wanted) == len([*model.parameters()])
    for name, gradient in wanted.items():
        tower, _, rest = name.partition(".")
        torch.testing.assert_close(ours[f"{names[tower]}.{rest}" if rest else name], gradient, **EXACT, msg=name)


@pytest.mark.parametrize("is_correct", [False, True])
@pytest.mark.parametrize("length", [3, 4, 9])
def test_nothing_depends_on_padding(is_correct: bool, length: int) -> None:
    """Captions may be sorted by length, with pads within them too: CLIP's number of an exclamation mark."""
    model = small_captioner().double()
    model.text.encoder.correct_cls_mask = is_correct
    captioner = Captioner(model.image, model.text, model.decoder)
    pixels, tokens = captioned(6)
    tokens[:, length:] = 0
    tokens[3, length - 2] = 0
    whole = open_clips(model)(model.image.encoder_inputs(pixels), tokens)
    assert family_of(model.text.encoder).ignores_padding(model.text.encoder)
    for width in (length, length + 1, TOKENS):
        _, text, loss = captioner(pixels, tokens[:, :width])
        torch.testing.assert_close(text, whole["text_features"], **EXACT)
        logits = whole["logits"].flatten(0, 1)
        labels = whole["labels"].flatten()
        expected = nn.functional.cross_entropy(logits, labels, ignore_index=0, reduction="sum")
        torch.testing.assert_close(loss, expected, **EXACT)


def test_checkpointing_computes_the_same() -> None:
    by_checkpoint = []
    for model in (small_captioner().double(), small_captioner(grad_checkpointing=True).double()):
        image, text, loss = Captioner(model.image, model.text, model.decoder)(*captioned(4))
        (image.cumsum(1).sum() + text.cumsum(1).sum() + loss).backward()
        by_checkpoint.append(gradients(model))
    torch.testing.assert_close(*by_checkpoint, **EXACT)


def test_without_a_graph_there_are_the_features_alone() -> None:
    model = small_captioner().double()
    captioner = Captioner(model.image, model.text, model.decoder)
    pixels, tokens = captioned(5)
    with torch.no_grad():
        image, text = captioner(pixels, tokens)
    torch.testing.assert_close(image, model.image(pixels), **EXACT)
    torch.testing.assert_close(text, model.text(tokens), **EXACT)
    first = captioner(pixels, tokens)
    torch.testing.assert_close(first[:2], (image, text), **EXACT)


def test_sums_of_chunks_add_up_to_the_batch() -> None:
    model = small_captioner().double()
    captioner = Captioner(model.image, model.text, model.decoder)
    pixels, tokens = captioned(7)
    whole = captioner(pixels, tokens)[2]
    chunks = [captioner(pixels[i : i + 3], tokens[i : i + 3])[2] for i in range(0, 7, 3)]
    torch.testing.assert_close(sum(chunks), whole, **EXACT)
    assert count_caption_labels(tokens) == sum(count_caption_labels(row[None]) for row in tokens)


def test_a_new_decoder_is_a_function_of_the_seed() -> None:
    """open_clip leaves a part of the decoder uninitialised."""
    first = small_captioner()
    second = small_captioner()
    assert all(p.isfinite().all() for p in first.parameters())
    torch.testing.assert_close(dict(first.state_dict()), dict(second.state_dict()), rtol=0, atol=0)
    width = first.decoder.width
    for p in (first.decoder.text_projection, first.decoder.cross_attn[0].attn.in_proj_weight):
        assert p.detach().std() == pytest.approx(width**-0.5, rel=0.15)


@pytest.mark.parametrize(
    ("part", "words", "message"),
    [
        ("vision_cfg", {"output_tokens": False}, "need output_tokens: true"),
        ("text_cfg", {"hf_model_name": "roberta-base"}, "towers of open_clip's own"),
        ("multimodal_cfg", {"heads": 5}, "does not describe an open_clip model"),
        ("multimodal_cfg", {"width": 16}, "does not describe an open_clip model: its decoder cannot read"),
    ],
)
def test_a_captioner_that_cannot_be_is_refused(part: str, words: dict[str, object], message: str) -> None:
    small = captioner_architecture()
    with pytest.raises(UserError, match=message):
        build_model(ModelConfig("own", small | {part: small[part] | words}))
