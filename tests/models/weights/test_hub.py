"""Hugging Face's client is loaded for a model that needs it, and for no other."""

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
