"""The towers give open_clip's features, and freeze as asked."""

from typing import Any

import open_clip
import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.transforms.functional import normalize

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.towers import build_model
from clipscale.step.cache.batch_norm import batch_norms
from tests.support.towers import architecture, small_model

SMALL = architecture()


def small_config(**settings: Any) -> ModelConfig:
    return ModelConfig(name="small", architecture=SMALL, **settings)


def test_features_are_open_clips_on_the_same_pixels() -> None:
    torch.manual_seed(0)
    model = build_model(small_config()).eval()
    reference = open_clip.model.CustomTextCLIP(**SMALL).eval()
    reference.visual.load_state_dict(model.image.encoder.state_dict())
    reference.text.load_state_dict(model.text.encoder.state_dict())
    pixels = torch.randint(0, 256, (5, 3, 12, 12), dtype=torch.uint8)
    tokens = model.tokenizer(["a red square", "two circles", "", "x " * 50, "déjà vu"])
    mean = open_clip.OPENAI_DATASET_MEAN
    std = open_clip.OPENAI_DATASET_STD
    normal = torch.stack([normalize(p.float() / 255, mean, std) for p in pixels])
    assert torch.allclose(model.image(pixels), reference.encode_image(normal, normalize=True), atol=1e-5)
    assert torch.allclose(model.text(tokens.to(torch.int32)), reference.encode_text(tokens, normalize=True), atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = model.image(pixels)
    assert rows.dtype == torch.float32 and torch.allclose(rows.norm(dim=1), torch.ones(5), atol=1e-6)


def test_scale_and_bias_start_as_asked() -> None:
    model = build_model(small_config())
    assert (model.logit_scale.exp().item(), model.logit_bias) == (pytest.approx(1 / 0.07), None)
    model = build_model(small_config(init_scale=10.0, init_bias=-10.0))
    assert (model.logit_scale.exp().item(), model.logit_bias) == (pytest.approx(10.0), -10.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(name="ViT-B32"), "model.name='ViT-B32' is not an open_clip architecture; did you mean 'ViT-B-32'"),
        (ModelConfig(name="x", architecture={"embed_dim": 4}), "model.architecture lacks vision_cfg"),
        (ModelConfig(name="x", architecture=SMALL | {"embed_dim": "wide"}), "does not describe an open_clip model"),
        (small_config(image_size=50), "image_size=50: the patches are 6 pixels wide; give a multiple, such as 48"),
    ],
)
def test_mistakes_are_named(config: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(config)


@pytest.mark.parametrize(
    ("part", "words", "message"),
    [
        ("vision_cfg", {"head_width": 3}, "divisible by num_heads"),
        ("vision_cfg", {"patch_size": 24}, "image tower cannot be used"),
        ("vision_cfg", {"output_tokens": True}, "image tower cannot be used .*not a row of features"),
        ("text_cfg", {"pool_type": "none"}, "text tower cannot be used .*not a row of features"),
        ("text_cfg", {"heads": 5}, "divisible by num_heads"),
    ],
)
def test_a_description_is_tried_when_the_model_is_built(part: str, words: dict[str, Any], message: str) -> None:
    """open_clip checks some of it when the model is first used, and by assertions."""
    described = SMALL | {part: SMALL[part] | words}
    with pytest.raises(UserError, match=f"does not describe an open_clip model.*{message}"):
        build_model(ModelConfig("theirs", described))


# ---- tokenizers ----


@pytest.mark.parametrize("text", ["a red square", "  two \n circles" * 40, "x" * 300, "日本 " * 2000, "a\ud800b"])
def test_tokens_of_a_caption_are_open_clips_however_long_it_is(text: str) -> None:
    tokenizer = build_model(small_config()).tokenizer
    expected = open_clip.SimpleTokenizer(context_length=8)([text.replace("\ud800", "?")])
    assert torch.equal(tokenizer([text]), expected)
    assert torch.equal(pickle.loads(pickle.dumps(tokenizer))([text]), expected), "as a worker has it"


def test_models_of_a_process_share_one_vocabulary() -> None:
    first, second = (tokenizer_of(name, {"context_length": length}) for name, length in (("a", 8), ("b", 9)))
    assert first.inner is second.inner


def test_words_beyond_some_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's captions have new words for ever."""
    monkeypatch.setattr("clipscale.models.tokenizer.WORDS", 10)
    tokenizer = build_model(small_config()).tokenizer
    reference = open_clip.SimpleTokenizer(context_length=8)
    for start in range(0, 100, 5):
        captions = [f"word{chr(97 + number % 26)}{number:x}x a" for number in range(start, start + 5)]
        assert torch.equal(tokenizer(captions), reference(captions))
        assert len(tokenizer.inner.cache) <= 30


def test_an_architecture_brings_its_tokenizer_from_local_files(tmp_path: Path) -> None:
    """A whole-word tokenizer that pads with its end token, as SigLIP's does."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["<unk>", "</s>", "a", "red", "square"]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
    model = build_model(with_tokenizer(str(tmp_path)))
    tokens = model.tokenizer(["A red, SQUARE!", "a " * 20])
    assert tokens.tolist() == [[2, 3, 4, 1, 1, 1, 1, 1], [2] * 7 + [1]]
    in_worker = pickle.loads(pickle.dumps(model.tokenizer))
    assert torch.equal(in_worker(["A red, SQUARE!", "a " * 20]), tokens)
    assert model.text(tokens).shape == (2, 16)

    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    opened = tmp_path / "opened"
    os.mkfifo(opened)  # whoever opens it waits for ever
    hostile = {"vocab": str(opened), "merges": str(opened), "tokenizer_file": str(opened), "vocab_file": str(opened)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | hostile))
    assert torch.equal(build_model(with_tokenizer(str(tmp_path))).tokenizer(["A red, SQUARE!", "a " * 20]), tokens)
    del settings["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"tokenizer cannot be loaded \(it has no pad_token; name one in"):
        build_model(with_tokenizer(str(tmp_path))).tokenizer(["a"])
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        build_model(with_tokenizer(str(tmp_path))).tokenizer(["a"])


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(tmp_path: Path) -> None:
    """The first step would end in an IndexError."""
    for words in (100, 49407):
        with pytest.raises(UserError, match=f"its largest token is 49407, and the model has {words}"):
            build_model(ModelConfig("own", architecture(words=words))).tokenizer(["a"])
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "far": 70000}, "<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its largest token is 70000, and the model has 49408"):
        build_model(with_tokenizer(str(tmp_path))).tokenizer(["a"])


def with_tokenizer(source: str) -> ModelConfig:
    own = {"hf_tokenizer_name": source, "tokenizer_kwargs": {"clean": "canonicalize"}, "no_causal_mask": True}
    return ModelConfig("own", SMALL | {"text_cfg": SMALL["text_cfg"] | own | {"pool_type": "last"}})


def test_a_convolutional_tower_computes_channels_last_and_the_same() -> None:
    """Its parameters keep their layout, and so do checkpoints, FSDP2 and optimizers."""
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    model = build_model(ModelConfig("small", SMALL | {"vision_cfg": vision}, image_size=64, batch_norm="frozen"))
    tower = model.image.double()
    torch.manual_seed(0)
    for p in tower.parameters():
        torch.nn.init.normal_(p, std=0.2)
    layouts = []
    last = tower.encoder.layer4[-1]
    last.register_forward_hook(
        lambda _, inputs, out: layouts.append(out.is_contiguous(memory_format=torch.channels_last))
    )
    pixels = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    results = []
    for layout in (tower.layout, torch.contiguous_format):
        tower.layout = layout
        tower.zero_grad()
        rows = tower(pixels)
        rows.square().cumsum(1).sum().backward()
        results.append([rows.detach(), *(p.grad for p in tower.parameters())])
    assert layouts == [True, False]
    assert all(p.is_contiguous() for p in tower.parameters())
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    assert small_model().image.layout == torch.contiguous_format


class BatchNormOfAnotherPackage(_BatchNorm):
    def _check_input_dim(self, x: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(("setting", "in_training"), [("frozen", []), ("sync", ["encoder.norm"])])
def test_frozen_batch_normalisation_is_all_that_the_cache_refuses_in_chunks(
    setting: str, in_training: list[str]
) -> None:
    model = build_model(small_config(batch_norm=setting))
    model.image.encoder.add_module("norm", BatchNormOfAnotherPackage(4))
    assert [*batch_norms(model.train().image)] == in_training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_are_normalised_in_the_type_of_the_patch_embedding(dtype: torch.dtype) -> None:
    """On a GPU one kernel does it. This compares how it rounds."""
    tower = small_model().image
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    actual = tower.normalised(pixels, dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, tower.encoder_inputs(pixels).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
