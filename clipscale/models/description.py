"""What open_clip's description of a model may say. It can come in a stranger's checkpoint, so it chooses numbers and known names.

It runs no code. Tokenizers and configurations come from the hub or a folder only where the user allows it.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import open_clip

from clipscale.common import files
from clipscale.common.errors import UserError

TOP = {"vision_cfg", "text_cfg"}
NUMBERS: dict[str, float] = {
    "embed_dim": 2**14, "width": 2**14, "head_width": 2**14, "layers": 512, "heads": 1024, "mlp_ratio": 64,
    "patch_size": 2**12, "image_size": 2**12, "context_length": 2**12, "vocab_size": 2**21, "pad_id": 2**21, "eos_id": 2**21,
    "attn_pooler_queries": 2**12, "attn_pooler_heads": 1024, "ls_init_value": 1e3, "patch_dropout": 1, "timm_drop": 1,
    "timm_drop_path": 1, "init_logit_scale": 1e3, "init_logit_bias": 1e3,
}  # fmt: skip
"""Numbers, or short lists of them, and their largest magnitude: ten times what the largest known models have."""
FLAGS = {
    "quick_gelu", "custom_text", "nonscalar_logit_scale", "attentional_pool", "no_ln_pre", "final_ln_after_pool",
    "output_tokens", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc",
    "timm_model_pretrained", "timm_proj_bias", "embed_cls", "no_causal_mask", "proj_bias", "hf_model_pretrained",
}  # fmt: skip
CHOICES = {
    "pos_embed_type", "pool_type", "block_type", "timm_pool", "timm_proj", "tokenizer_mode", "proj_type", "hf_proj_type",
    "hf_pooler_type",
}  # fmt: skip
"""Words by which open_clip chooses between its own parts."""
OPTIONS = {
    "tokenizer_kwargs": {"clean", "strip_sep_token"},
    "act_kwargs": {"approximate", "inplace"},
    "norm_kwargs": {"eps", "elementwise_affine"},
}
"""The options of parts. Others can run code, such as trust_remote_code."""
TOKENIZER, MOST_BYTES = (".json", ".txt", ".model", ".jinja"), 1 << 28
"""Files of a tokenizer, and the size of the largest. The largest known one has 33 MB."""
HUB = ("hf_model_name", "hf_tokenizer_name")
"""Names of repositories or folders; see `source_of`."""


def check(description: dict[str, Any], part: str = "") -> None:
    """Raise UserError, `model.architecture: ...`, for anything that a description may not hold."""
    for key, value in description.items():
        if not part and key in TOP:
            if not isinstance(value, dict):
                raise UserError(f"model.architecture: {key} must hold settings")
            check(value, f"{key}.")
        elif not _fits(key, value):
            raise UserError(
                f"model.architecture: {part}{str(key)[:40]}={str(value)[:60]!r} is not allowed in a model's description"
            )


def _fits(key: str, value: Any) -> bool:
    if value is None:
        return True
    if key in NUMBERS:
        values = value if isinstance(value, list | tuple) else [value]
        return 0 < len(values) <= 4 and all(type(one) in (int, float) and abs(one) <= NUMBERS[key] for one in values)
    if key in OPTIONS:
        short = isinstance(value, dict) and set(value) <= OPTIONS[key]
        return short and all(type(one) in (bool, int, float) or _is_word(one) for one in value.values())
    if key == "timm_model_name":
        return (
            isinstance(value, str) and re.fullmatch(r"[\w.]{1,80}", value, re.ASCII) is not None
        )  # no address, no folder
    if key in HUB:
        return isinstance(value, str) and len(value) <= 4096
    return (key in FLAGS and isinstance(value, bool)) or (key in CHOICES and _is_word(value))


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w{0,40}", value, re.ASCII) is not None


def source_of(name: str, hub: bool) -> str:
    """Where transformers loads a tokenizer or configuration from: `name` if the user allows it (`model.hub`).

    Otherwise the folder of the local Hugging Face cache that holds it, for the names in open_clip's own descriptions.
    Raises UserError where this is not so.
    """
    if hub:
        _check_folder(Path(name))
        return name
    remedy = "set model.hub=true (eval and export: hub=true) to load it from the Hugging Face hub or a folder"
    if name not in _own_names():
        raise UserError(f"model.architecture names {name[:80]!r}; {remedy}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise UserError(f"the model needs {name!r}, which is not in the local cache; {remedy}") from error


def _check_folder(folder: Path) -> None:
    """Raise UserError for a folder, if it is one, with what transformers would wait for, or read without end."""
    for file in folder.iterdir() if folder.is_dir() else ():
        if not file.is_dir():
            with files.reported("model.architecture names a file", file, "remove it"):
                files.opened(file, most=MOST_BYTES if file.suffix in TOKENIZER else None).close()


@cache
def _own_names() -> set[str]:
    """The repositories that open_clip's own descriptions name."""
    known = [open_clip.get_model_config(name) or {} for name in open_clip.list_models()]
    return {str(one["text_cfg"][key]) for one in known for key in HUB if one.get("text_cfg", {}).get(key)}
