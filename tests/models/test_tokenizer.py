"""Tokenizers of open_clip and of transformers work from local files, and captions that fill the context are recognised."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.data.loader.shard_stream import last_place
from clipscale.models.towers import build_model
from tests.data.files import write_shards
from tests.data.streams import contents, open_stream
from tests.models.test_towers import SMALL

LENGTH = 8
PAD, END, CLASS = 1, 2, 3
Rows = Callable[[list[str]], torch.Tensor]


def words(end: list[int], pad: int, last: list[int] | None = None) -> Rows:
    """A tokenizer that gives each word a number, then the end token, padding, and the tokens `last` at the end of every row."""
    closing = last or []

    def rows(texts: list[str]) -> torch.Tensor:
        free = LENGTH - len(closing)
        found = [[10 + hash(word) % 90 for word in text.split()][: free - len(end)] + end for text in texts]
        return torch.tensor([row + [pad] * (free - len(row)) + closing for row in found])

    return rows


KINDS = {
    "an end and padding (CLIP)": words([END], 0),
    "padding that is the end (SigLIP)": words([PAD], PAD),
    "no end": words([], PAD),
    "a class token at the end": words([END], PAD, [CLASS]),
    "a class token, and padding that is the end": words([PAD], PAD, [CLASS]),
    "open_clip's": open_clip.SimpleTokenizer(context_length=LENGTH),
}


@pytest.mark.parametrize("kind", KINDS)
def test_captions_that_fill_the_context_differ_from_shorter_ones(kind: str) -> None:
    tokenizer = KINDS[kind]
    place, padding = last_place(tokenizer, LENGTH)
    lengths = range(1, 2 * LENGTH)
    rows = np.asarray(tokenizer(["x " * length for length in lengths]))
    full = (rows[:, place] != padding).tolist()
    longest = next(n for n in lengths if torch.equal(*tokenizer(["x " * n, "x " * (n + 1)])))
    assert full == [length >= longest for length in lengths], (place, padding, rows)


# -- of transformers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a whole-word tokenizer that pads with its end token, as SigLIP's does."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["<unk>", "</s>", "a", "red", "square", *map(str, range(40))]
    plain = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(folder)
    return folder


def with_tokenizer(source: str) -> ModelConfig:
    text = SMALL["text_cfg"] | {  # type: ignore[operator]
        "vocab_size": 64,
        "hf_tokenizer_name": source,
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "pool_type": "last",
        "no_causal_mask": True,
    }
    return ModelConfig("own", SMALL | {"text_cfg": text}, hub=True)


def test_an_architecture_brings_its_tokenizer_from_local_files(folder: Path) -> None:
    model = build_model(with_tokenizer(str(folder)))
    tokens = model.tokenizer(["A red, SQUARE!", "a " * 20])
    assert tokens.tolist() == [[2, 3, 4, 1, 1, 1, 1, 1], [2] * 7 + [1]]
    assert torch.equal(pickle.loads(pickle.dumps(model.tokenizer))(["A red, SQUARE!"]), tokens[:1]), (
        "as workers have it"
    )
    assert model.text(tokens).shape == (2, 16)


def test_truncated_captions_are_counted_where_the_padding_is_the_end(folder: Path, tmp_path: Path) -> None:
    """Of eight tokens one is the end: six words leave one token free, seven fill the context, eight are cut."""
    tokenizer = build_model(with_tokenizer(str(folder))).tokenizer
    write_shards(tmp_path, [12])
    for count, full in ((6, 0), (7, 12), (8, 12)):
        template = "{} " + "a " * (count - 2)  # a caption is two words
        with open_stream(tmp_path, batch=12, templates=[template], tokenizer=tokenizer) as stream:
            contents(stream, 1)
            assert stream.truncated == full, f"{count} words: {stream.truncated} of 12"


def test_a_tokenizer_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"its tokenizer /nowhere/at/all cannot be loaded"):
        build_model(with_tokenizer("/nowhere/at/all"))


def test_the_message_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'clipscale\[hf\]'"):
        build_model(with_tokenizer("me/mine"))
