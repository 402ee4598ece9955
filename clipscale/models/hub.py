"""Whether weights that are not on this machine can be fetched: asks once, before a run is planned or torch loaded.

open_clip and Hugging Face's client ask twelve times, for a minute and a half.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from clipscale.common.errors import UserError
from clipscale.config.libraries import model_description, pretrained
from clipscale.config.sections import ModelConfig
from clipscale.models.sources import HUB, local_source

PATIENCE_S = 3.0


def check_connection(model: ModelConfig) -> None:
    """Raise UserError for weights and tokenizers that are not in the cache, if their server has no answer."""
    server = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    for repository in repositories(model):
        if not cached(repository) and not reached(server):
            raise UserError(
                f"{repository} is not on this machine, and cannot be fetched: {server} has no answer; download it "
                "elsewhere, and give model.weights=FOLDER, or copy Hugging Face's cache"
            )


def repositories(model: ModelConfig) -> Iterator[str]:
    """Where a model's weights and its tokenizer are fetched, as far as they are no files or folders."""
    for value in (model.weights, model.image.weights, model.text.weights):
        if value and not local_source(value):
            tag = pretrained().get_pretrained_cfg(model.name.replace("/", "-"), value)
            yield value.removeprefix(HUB) if value.startswith(HUB) else tag.get("hf_hub", "").rpartition("/")[0]
    text = (model.architecture or model_description(model.name)).get("text_cfg", {})
    tokenizer = text.get("hf_tokenizer_name", "")
    if tokenizer and not Path(tokenizer).is_dir():
        yield tokenizer


def reached(server: str) -> bool:
    """Whether a server can be connected to; True where a proxy would know."""
    address = urlsplit(server)
    try:
        if not getproxies():
            port = address.port or socket.getservbyname(address.scheme)
            socket.create_connection((address.hostname or "", port), PATIENCE_S).close()
    except OSError:
        return False
    return True


def cached(repository: str) -> bool:
    """Whether Hugging Face's cache has files of a repository; True for none."""
    from huggingface_hub import snapshot_download

    try:
        return not repository or bool(snapshot_download(repository, local_files_only=True))
    except (OSError, ValueError):  # or no name of a repository
        return False
