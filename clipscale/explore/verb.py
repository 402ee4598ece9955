"""The verb `clipscale explore`: loads models, embeds the set with each where that has not been done, and serves the page."""

import hashlib
import importlib
import socket
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from clipscale import distributed
from clipscale.config.checks import check_values
from clipscale.config.explore import ExploreConfig, check_explore
from clipscale.data.features import NOTE
from clipscale.embed.verb import main as embed
from clipscale.errors import UserError
from clipscale.explore.embedded import EmbeddedSet
from clipscale.explore.pictures import Pictures
from clipscale.explore.side import Side, load
from clipscale.terminal import say

NEEDED = ("starlette", "uvicorn")


def main(config: ExploreConfig) -> None:
    """Serve the page until it is interrupted. Raises UserError."""
    check_values(config)
    check_explore(config)
    for package in NEEDED:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"explore needs {package}; pip install 'clipscale[explore]'") from error
    with listening(config) as taken:
        sides, pictures = prepared(config)
        from clipscale.explore.server import serve

        host, port = taken.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        if not ip_address(host).is_loopback:
            say(f"warning: host={config.host}: whoever reaches {address} sees the set", error=True)
        say(f"{len(sides[0].embedded or ())} samples: {address} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            serve(taken, sides, pictures, config)


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


def prepared(config: ExploreConfig) -> tuple[list[Side], Pictures]:
    """The models with their sets, and the pictures of these. Raises UserError."""
    given = [Path(name).expanduser() for name in config.data.train or []]
    folders = [path for path in given if (path / NOTE).is_file()]
    sources = [name for name, path in zip(config.data.train or [], given) if path not in folders]
    sets = [EmbeddedSet(folder) for folder in folders]
    device = distributed.start(config.device, config.launch.threads).device
    distributed.stop()
    sides = [load(one, device) for one in config.sides()]
    for side in sides:
        side.embedded = next((one for one in sets if fits(one, side)), None) or _embedded(side, sources, sets)
    if idle := next((one for one in sets if all(side.embedded is not one for side in sides)), None):
        raise UserError(_misfit(idle, sides[0]))
    places = {part.name: part.source for side in sides if side.embedded for part in side.embedded.parts}
    return sides, Pictures(places, config.data)


def fits(embedded: EmbeddedSet, side: Side) -> bool:
    """Whether the features are those of the model, by the digests of its towers."""
    image, text = side.digests
    return embedded.note.get("weights") == image and embedded.note.get("text") in (None, text)


def _embedded(side: Side, sources: list[str], sets: list[EmbeddedSet]) -> EmbeddedSet:
    """The set of a model that none of the given folders is of: its sources are embedded, or were by an earlier call."""
    if not sources:
        raise UserError(_misfit(sets[0], side))
    config = side.config
    names = "\n".join([*side.digests, *map(repr, sources), repr(config.data.captions)])
    folder = Path(config.out) / hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    embed(replace(config, out=str(folder), data=replace(config.data, train=sources)))
    return EmbeddedSet(folder)


def _misfit(embedded: EmbeddedSet, side: Side) -> str:
    model = str(embedded.note.get("model", "another model"))[:80]
    return (
        f"data={embedded.folder}: its features are of other weights of {model} (digest {str(embedded.note.get('weights'))[:8]}) than "
        f"those of {side.title} ({side.digests[0][:8]}); embed the set with that model, or add its shards: data=[FOLDER,SHARDS]"
    )
