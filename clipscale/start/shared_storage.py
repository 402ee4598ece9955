"""Checks that all ranks see the run's folder. Otherwise each host would keep its own part of every checkpoint."""

import logging
import socket
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.ranks import local_rank
from clipscale.distributed.agreement import run_on_rank0
from clipscale.distributed.world import World

log = logging.getLogger(__name__)

# After this many seconds a host says that it waits.
NOTICE_S = 5.0
# Longest wait for what another host has written: NFS remembers for a minute that a name was missing.
FOLDER_APPEARS_WITHIN_S = 60.0
# Most hosts that a message names.
MAX_NAMED = 3


def check_shared(folder: Path, world: World) -> None:
    """Raise UserError on all ranks if a host does not see the run's folder as rank 0 does. A collective."""
    if world.size == 1:
        return

    def begin() -> tuple[str, str]:
        name = files.unfinished_name("shared")
        with files.damage_to_user_error("run", folder, "choose another run=PATH"):
            (folder / name).write_text(name)
        return name, socket.gethostname()

    name, host = run_on_rank0(world, begin)
    token = folder / name
    try:
        seen = files.wait_until_visible(token, len(name), NOTICE_S)
        if not seen:
            if local_rank() == 0:
                log.warning("run=%s: %s does not see it as %s does; looking again", folder, socket.gethostname(), host)
            seen = files.wait_until_visible(token, len(name), FOLDER_APPEARS_WITHIN_S)
        blind = [name for name in world.all_gather_object("" if seen else socket.gethostname()) if name]
    finally:
        if world.is_rank0:
            token.unlink(missing_ok=True)
    if blind:
        hosts = sorted({*blind})
        shown = ", ".join(hosts[:MAX_NAMED]) + (", ..." if len(hosts) > MAX_NAMED else "")
        raise UserError(
            f"run={folder}: {len(blind)} of {world.size} processes, on {shown}, do not see the folder that {host} has; "
            "put the folder on storage that all share"
        )
