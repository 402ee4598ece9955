"""Whether weights that are not on this machine can be fetched: asks once, before a run is planned or torch loaded.

open_clip and Hugging Face's client ask twelve times, for a minute and a half.
"""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from clipscale.common.errors import UserError
from clipscale.config.libraries import pretrained
from clipscale.config.sections import ModelConfig
from clipscale.models.sources import HUB, local_source

PATIENCE_S = 3.0


def check_connection(model: ModelConfig) -> None:
    """Raise UserError for weights of a tag or a repository that are not in the cache, if their server has no answer."""
    server = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    for value in (model.weights, model.image.weights, model.text.weights):
        if not value or local_source(value):
            continue
        repository = value.removeprefix(HUB)
        if repository == value:
            known = pretrained().get_pretrained_cfg(model.name.replace("/", "-"), value)
            repository = known.get("hf_hub", "").rpartition("/")[0]
        if repository and not reached(server) and not cached(repository):
            raise UserError(
                f"the weights {value!r} are not on this machine, and {server} has no answer; download {repository} "
                "elsewhere, and give its folder"
            )


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
    """Whether Hugging Face's cache has files of a repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(repository, local_files_only=True)
    except LocalEntryNotFoundError:
        return False
    return True
