"""Asks once whether weights that are not on this machine can be fetched, before a run is planned or torch is loaded.

open_clip and Hugging Face's client ask twelve times, for a minute and a half.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.config.libraries import pretrained
from clipscale.config.model import ModelConfig
from clipscale.models.weights.sources import HUB, local_source

PATIENCE_S = 3.0


def check_connection(model: ModelConfig) -> None:
    """Raise UserError for weights and tokenizers that are not in the cache, if their server has no answer."""
    needed = [*filter(None, repositories(model))]
    if not needed:
        return
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    server = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    for repository in needed:
        try:
            snapshot_download(repository, local_files_only=True)
        except LocalEntryNotFoundError:
            try:
                server.model_info(repository, timeout=PATIENCE_S)
            except HfHubHTTPError:  # the server answers; loading the weights will explain the error
                continue
            except Exception as error:  # each library that connects raises exceptions of its own
                raise UserError(
                    f"{repository} is not on this machine, and cannot be fetched: {server.endpoint} has no answer; "
                    "download it elsewhere, and give model.weights=FOLDER, or copy Hugging Face's cache"
                ) from error
        except HFValidationError as error:
            raise UserError(f"{repository} is not a repository of Hugging Face ({error})") from error


def repositories(model: ModelConfig) -> Iterator[str]:
    """The repositories that have a model's weights and tokenizer. Files and folders on this machine are left out.

    Raises UserError for a tokenizer's folder that is missing.
    """
    for setting, value in model.weight_settings:
        if value.startswith(HUB):
            yield value.removeprefix(HUB)
        elif not local_source(value, setting):
            tag = pretrained().get_pretrained_cfg(model.name.replace("/", "-"), value)
            yield tag.get("hf_hub", "").rpartition("/")[0]
    tokenizer = model.description.get("text_cfg", {}).get("hf_tokenizer_name", "")
    if tokenizer and not Path(tokenizer).is_dir():
        if Path(tokenizer).is_absolute():
            raise UserError(
                f"model.name={model.name}: its tokenizer's folder {tokenizer} is missing; put it there again"
            )
        yield tokenizer
