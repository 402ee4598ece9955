"""Captions of any length become open_clip's tokens, by its own tokenizer or by one from a stranger's folder."""

import json
import os
import pickle
from pathlib import Path

import open_clip
import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.data.tokenizer import tokenizer_of
from clipscale.models.towers import build_model
from tests.support.towers import architecture

ARCHITECTURE = architecture()
SMALL = ModelConfig("small", ARCHITECTURE)


def with_tokenizer(source: str) -> ModelConfig:
    own = {"hf_tokenizer_name": source, "tokenizer_kwargs": {"clean": "canonicalize"}, "no_causal_mask": True}
    return ModelConfig("own", ARCHITECTURE | {"text_cfg": ARCHITECTURE["text_cfg"] | own | {"pool_type": "last"}})


@pytest.mark.parametrize("text", ["a red square", "  two \n circles" * 40, "x" * 300, "日本 " * 2000, "a\ud800b"])
def test_tokens_of_a_caption_are_open_clips_however_long_it_is(text: str) -> None:
    tokenizer = build_model(SMALL).tokenizer
    expected = open_clip.SimpleTokenizer(context_length=8)([text.replace("\ud800", "?")])
    assert torch.equal(tokenizer([text]), expected)
    assert torch.equal(pickle.loads(pickle.dumps(tokenizer))([text]), expected), "as a worker has it"


def test_models_of_a_process_share_one_vocabulary() -> None:
    first, second = (tokenizer_of(name, {"context_length": length}) for name, length in (("a", 8), ("b", 9)))
    assert first.inner is second.inner


def test_words_beyond_some_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's captions have new words for ever."""
    monkeypatch.setattr("clipscale.data.tokenizer.WORDS", 10)
    tokenizer = build_model(SMALL).tokenizer
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
