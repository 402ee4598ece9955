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


def check_shared(run_dir: Path, world: World) -> None:
    """Raise UserError on all ranks if a host does not see the run's folder as rank 0 does. A collective."""
    if world.size == 1:
        return

    def write_probe() -> tuple[str, str]:
        name = files.unfinished_name("shared")
        with files.damage_to_user_error("run", run_dir, "choose another run=PATH"):
            (run_dir / name).write_text(name)
        return name, socket.gethostname()

    name, host = run_on_rank0(world, write_probe)
    probe = run_dir / name
    try:
        seen = files.wait_until_visible(probe, len(name), NOTICE_S)
        if not seen:
            if local_rank() == 0:
                log.warning("run=%s: %s does not see it as %s does; looking again", run_dir, socket.gethostname(), host)
            seen = files.wait_until_visible(probe, len(name), FOLDER_APPEARS_WITHIN_S)
        # One name for each process that does not see it.
        hosts_without_folder = [name for name in world.all_gather_object("" if seen else socket.gethostname()) if name]
    finally:
        if world.is_rank0:
            probe.unlink(missing_ok=True)
    if hosts_without_folder:
        hosts = sorted({*hosts_without_folder})
        shown = ", ".join(hosts[:MAX_NAMED]) + (", ..." if len(hosts) > MAX_NAMED else "")
        raise UserError(
            f"run={run_dir}: {len(hosts_without_folder)} of {world.size} processes, on {shown}, do not see the folder "
            f"that {host} has; put the folder on storage that all share"
        )
