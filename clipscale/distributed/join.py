"""How the ranks of a run find each other: the store, the process group, and their end."""

import os
import resource
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from clipscale.common import ranks
from clipscale.common.cpu import cores
from clipscale.common.errors import UnreachableError, UserError, one_line
from clipscale.common.memory import keep_freed_memory
from clipscale.distributed.rank_signals import RankSignals
from clipscale.distributed.world import TIMEOUT, World

# Seconds between rank 0's checks of which ranks have joined.
JOIN_POLL_S = 0.05
# Time limit in seconds of the store's answer about signals.
SIGNAL_S = 5.0


def init_world(device: str, timeout_s: float = TIMEOUT.total_seconds()) -> World:
    """Join the process group of the ranks in torchrun's environment variables. Without these: one process alone.

    `timeout_s`: how long a rank waits for the others. Raises UserError if the requested device does not exist.
    """
    rank = ranks.rank()
    size = ranks.size()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device here; use device=cpu or fix the driver")
    chosen = torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    if device != "cpu" and torch.cuda.is_available():
        local_rank = ranks.local_rank()
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"launch.procs: local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} visible)"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    else:
        keep_freed_memory()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cores())
    signal_store = None
    if size > 1 and not dist.is_initialized():
        allow_open_files()
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # the ring's transfers start while kernels fill the GPU
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connects two ranks when they first communicate
        backend, bound_device = ("nccl", chosen) if chosen.type == "cuda" else ("gloo", None)
        store, signal_store = connect_store(rank, size, timeout)
        # With device_id NCCL connects now, not in the first step.
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=size, device_id=bound_device
        )
    return World(rank, size, chosen, timeout, RankSignals(signal_store))


def connect_store(rank: int, size: int, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """The store of the ranks of this attempt, and a second connection to it, for signals.

    torchrun's store survives a restart and still has the old ranks' addresses, so each attempt needs a prefix of its
    own. The restart count cannot be the prefix: machines disagree on it after an agent itself has restarted. So rank 0
    picks a random prefix, and the other ranks ask for it. Without torchrun rank 0 opens the store. Raises
    UnreachableError if a rank does not ask, or rank 0 does not answer, in time, and where rank 0 cannot open the port.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    rank0_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(address, port, is_master=rank0_hosts_store and rank == 0, timeout=timeout)
        prefix = agree_on_prefix(store, rank, size, timeout)
        signal_store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    except dist.DistError as error:
        reason = one_line(error)
        if rank0_hosts_store and rank == 0:
            raise UnreachableError(
                f"MASTER_PORT={port}: rank 0 cannot open it ({reason}); end what has it, or give a free port"
                if "failed to listen" in reason
                else f"MASTER_ADDR={address}: rank 0 does not reach itself there, at port {port} ({reason}); give the "
                "address of its machine"
            ) from error
        raise UnreachableError(
            f"launch.timeout_s={timeout.total_seconds():g}: rank {rank} reached no rank 0 at {address}:{port} "
            f"({reason}); see whether rank 0 has started, and raise the limit if it only needs longer"
        ) from error
    signal_store.set_timeout(timedelta(seconds=SIGNAL_S))
    return dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, signal_store)


def agree_on_prefix(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """The prefix of this attempt, which all ranks agree on. Raises UnreachableError if a rank does not ask in time."""
    token = uuid.uuid4().hex  # on rank 0 the prefix, on another rank the name of its question
    if rank:
        store.set(f"asks/{rank}", token)
        prefix = store.get(f"answers/{token}").decode()
        store.add(f"{prefix}/joined", 1)
        return prefix
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"{token}/joined", 0) < size - 1:
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"launch.timeout_s={timeout.total_seconds():g}: not all of {size} ranks arrived in that time"
            )
        for other in range(1, size):
            # The question may be left from the last attempt. Then the rank of this attempt asks again.
            if store.check([f"asks/{other}"]):
                store.set(f"answers/{store.get(f'asks/{other}').decode()}", token)
        time.sleep(JOIN_POLL_S)
    return token


def allow_open_files() -> None:
    """Raise this process's limit of open files and sockets as far as the system allows.

    Many systems start at 1024: too few for rank 0 of 512, to which all others connect for a checkpoint.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def destroy_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
