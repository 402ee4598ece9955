"""The description of a model in a checkpoint chooses numbers and known names; it runs no code and reaches no other weights."""

from copy import deepcopy
from typing import Any

import open_clip
import pytest

from clipscale.config.sections import ModelConfig
from clipscale.errors import UserError
from clipscale.models.towers import architecture


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("text_cfg", {"tokenizer_kwargs": {"trust_remote_code": True}}),
        ("text_cfg", {"tokenizer_kwargs": {"clean": "lower", "cache_dir": "/tmp/x"}}),
        ("vision_cfg", {"timm_model_name": "hf-hub:stranger/model"}),
        ("vision_cfg", {"timm_model_name": "hf_hub:stranger/model"}),
        ("vision_cfg", {"timm_model_name": "local-dir:/tmp/model"}),
    ],
)
def test_a_received_description_is_refused(part: str, values: dict[str, Any]) -> None:
    description = deepcopy(open_clip.get_model_config("ViT-B-32"))
    assert description is not None
    description[part] |= values
    with pytest.raises(UserError, match=r"model\.architecture"):
        architecture(ModelConfig(architecture=description))


def test_the_descriptions_of_open_clip_are_accepted() -> None:
    for name in open_clip.list_models():
        description = open_clip.get_model_config(name)
        if description is not None and "multimodal_cfg" not in description:
            architecture(ModelConfig(name=name))
