"""The verb `clipscale explore`: loads models, embeds the set with each where that has not been done, and serves the page."""

import hashlib
import importlib
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.config.tools import IMAGE, TEXT, ExploreConfig, check_explore
from clipscale.data.features import NOTE
from clipscale.data.shards.access import is_local
from clipscale.distributed import world as distributed
from clipscale.embed.run import embed
from clipscale.explore.convert import as_arrays
from clipscale.explore.embedded import EmbeddedSet
from clipscale.explore.pictures import Pictures
from clipscale.explore.search_model import SearchModel, load

NEEDED = ("starlette", "uvicorn")
PIXELS = ("image_size", "mean", "std", "transform", "model.resize", "model.interpolation")
"""Values of the note that decide on the pixels of a picture."""


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    check_explore(config)
    for package in NEEDED:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"explore needs {package}; pip install 'clipscale[explore]'") from error
    with listening(config) as taken:
        models, pictures = prepared(config)
        from clipscale.explore.server import serve

        host, port = taken.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        if not ip_address(host).is_loopback:
            say(f"warning: host={config.host}: whoever reaches {address} sees the set", error=True)
        say(f"{len(models[0].embedded or ())} samples: {address} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            serve(taken, models, pictures, config)


def listening(config: ExploreConfig) -> socket.socket:
    """A socket at `host` and `port`, taken before the long work. Raises UserError."""
    try:
        kind, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(kind)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen()
    except OSError as error:
        raise UserError(
            f"port={config.port}: cannot listen at {config.host} ({error.strerror}); give another port=, or port=0 for a free one"
        ) from error
    return taken


def prepared(config: ExploreConfig) -> tuple[list[SearchModel], Pictures]:
    """The models with their sets, and the pictures of these. Raises UserError."""
    given = [Path(name).expanduser() for name in config.data.train or []]
    folders = [path for path in given if (path / NOTE).is_file()]
    sources = [name for name, path in zip(config.data.train or [], given) if path not in folders]
    out = Path(config.models()[0].out)
    sets = [EmbeddedSet(as_arrays(folder, out, config.data)) for folder in folders]
    device = distributed.start(config.device, config.launch.threads).device
    distributed.stop()
    models = [load(one, device) for one in config.models()]
    for model in models:
        model.embedded = next((one for one in sets if not misfit(one, model)), None) or _embedded(model, sources, sets)
    searched = [model.embedded for model in models if model.embedded]
    if idle := next((one for one in sets if all(other is not one for other in searched)), None):
        raise UserError(misfit(idle, models[0]))
    return models, Pictures(_places(searched), config.data)


def _places(sets: Sequence[EmbeddedSet]) -> dict[str, str]:
    """Where the pictures of each part are. Raises UserError where two sets have parts of one name from two sources."""
    found: dict[str, tuple[str, Path]] = {}
    for embedded in sets:
        for part in embedded.parts:
            source, folder = found.setdefault(part.name, (part.source, embedded.folder))
            one, other = (Path(place).resolve() if is_local(place) else place for place in (source, part.source))
            if one != other:
                raise UserError(
                    f"data: the part {part.name} is of {source} in {folder}, and of {part.source} in "
                    f"{embedded.folder}; compare models on sets of the same shards: data=[FOLDER,SHARDS]"
                )
    return {name: source for name, (source, _) in found.items()}


def misfit(embedded: EmbeddedSet, model: SearchModel) -> str:
    """Why the features are not those that the model computes; empty if they are.

    They must be of its weights, and of pixels as those of its queries. Older notes have fewer values.
    """
    notes = [(note, note.get("inputs")) for note in (embedded.note, model.note)]
    theirs, ours = (note | (inputs if isinstance(inputs, dict) else {}) for note, inputs in notes)
    names = ["weights", *(name for name in (TEXT, *(PIXELS if IMAGE in embedded.kinds else ())) if name in theirs)]
    name = next((name for name in names if theirs.get(name) != ours.get(name)), "")
    if not name:
        return ""
    value, own = (str(note.get(name))[:80] for note in (theirs, ours))
    what = f"with {name}={value}, and {model.title} takes {name}={own}"
    if name in ("weights", TEXT):
        named = str(theirs.get("model", "another model"))[:80]
        what = f"of other weights of {named} (digest {value[:8]}) than those of {model.title} ({own[:8]})"
    return f"data={embedded.folder}: its features are {what}; embed the set with that model, or add its shards: data=[FOLDER,SHARDS]"


def _embedded(model: SearchModel, sources: list[str], sets: list[EmbeddedSet]) -> EmbeddedSet:
    """The set of a model that none of the given folders is of: its sources are embedded, or were by an earlier call."""
    if not sources:
        raise UserError(misfit(sets[0], model))
    names = json.dumps([model.note, sources], sort_keys=True)
    folder = Path(model.config.out) / hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    embed(replace(model.config, out=str(folder), data=replace(model.config.data, train=sources)))
    return EmbeddedSet(folder)
