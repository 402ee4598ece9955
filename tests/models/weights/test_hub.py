"""Hugging Face's client is loaded for a model that needs it, and for no other."""

from pathlib import Path

import pytest

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.weights.hub import check_connection
from tests.support.interpreter import interpreted

CHECK = """
import sys
from clipscale.config.model import ModelConfig
from clipscale.models.weights.hub import check_connection
check_connection(ModelConfig())
assert "huggingface_hub" not in sys.modules, "imported"
"""


def test_a_model_without_weights_does_not_load_hugging_faces_client() -> None:
    result = interpreted(CHECK)
    assert result.returncode == 0, result.stderr


def test_a_tokenizers_folder_that_is_missing_is_no_repository(tmp_path: Path) -> None:
    text = {"hf_tokenizer_name": str(tmp_path / "words")}
    with pytest.raises(UserError, match=r"model.name=own: its tokenizer's folder .*words is missing"):
        check_connection(ModelConfig("own", {"embed_dim": 8, "vision_cfg": {}, "text_cfg": text}))
