"""The rendezvous of the ranks of a run: a store at torchrun's address, and connections between all ranks."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch.distributed as dist

from zero.distributed.failure import GRACE_S, first_line, some_ranks
from zero.errors import ConfigError, DeadlineError, RankFailedError, WorldError

_HOSTED: dict[tuple[str, int], dist.Store] = {}
"""Stores that this process hosts, kept until it ends.

The next world of another rank may need the store before this rank has closed the last world.
"""

LOOPBACK = "127.0.0.1"


def env_int(name: str, default: str = "") -> int:
    """Read a whole number from the environment.

    Raises:
        ConfigError: the variable is missing or not a whole number.
    """
    value = os.environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"the environment variable {name} must be a whole number, not {value!r}") from None


def check_environment() -> None:
    """Raise ConfigError unless torchrun's environment variables are set."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"the environment lacks {', '.join(missing)}. Start the ranks with torchrun.")


def store_address() -> tuple[str, int]:
    """Return host and port of the rendezvous store."""
    return os.environ["MASTER_ADDR"], env_int("MASTER_PORT")


def listens(address: tuple[str, int]) -> bool:
    """Return whether the store's host accepts connections."""
    try:
        socket.create_connection(address, GRACE_S).close()
    except OSError:
        return False
    return True


def rank_of_process() -> int:
    """Return this process's rank, also before a world is open."""
    return dist.get_rank() if dist.is_initialized() else env_int("RANK", "0")


def open_key_value_store(rank: int, size: int, timeout_s: float) -> dist.Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT, and return when every rank has connected.

    torchrun's agent hosts the store; without an agent rank 0 does.
    """
    host, port = store_address()
    hosting_is_ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    hosting = rank == 0 and hosting_is_ours
    timeout = timedelta(seconds=timeout_s)
    try:
        server = dist.TCPStore(host, port, size, hosting, timeout, wait_for_workers=False, multi_tenant=True)
        if hosting:
            _HOSTED[host, port] = server
        # Keys have a prefix, so that a second world in the same processes does not find the keys of the first, and a
        # restart does not find those of an earlier start in an agent's store. If rank 0 hosts the store, the prefix has
        # no count of restarts, because the ranks of two nodes may have counted different ones.
        start = "0" if hosting_is_ours else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        opened = server.add(f"zero/opened/{rank}/{start}", 1)
        store = dist.PrefixStore(f"zero/{start}/{opened}", server)
        store.set(f"here/{rank}", socket.gethostname())
    except RuntimeError as error:
        error_class = DeadlineError if "timed out" in str(error).lower() else WorldError
        raise error_class(
            f"rank {rank} of {size} found no store at {host}:{port} within {timeout_s:g} s: {first_line(error)}"
        ) from error
    _await_all(store, "here", rank, size, timeout_s, "start")
    return store


def local_store() -> dist.TCPStore:
    """Host a store on a free port of the loopback. torch's own sockets accept connections from other machines."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def hosts(store: dist.Store, size: int) -> list[str]:
    """Return the name of each rank's machine."""
    return _texts(store, "here", size)


def check_process_groups(store: dist.Store, rank: int, size: int, made: int, timeout_s: float) -> None:
    """Raise ConfigError unless every rank has `made` as many process groups, from which torch makes their names."""
    store.set(f"groups/{rank}", str(made))
    _await_all(store, "groups", rank, size, timeout_s, "connect")
    if len({*(counts := _texts(store, "groups", size))}) > 1:
        raise ConfigError(
            f"the ranks have made {', '.join(counts)} process groups of torch. Make as many on each rank, by "
            "init_device_mesh or new_group."
        )


def connect_all(
    store: dist.Store,
    rank: int,
    size: int,
    connect: Callable[[], dist.ProcessGroup | None],
    *,
    timeout_s: float,
    wait_s: float,
    hint: str,
) -> dist.ProcessGroup | None:
    """Call `connect` and return when all ranks have connected.

    A rank that left earlier would break connections that others are still making.

    Args:
        timeout_s: the deadline of all, in seconds.
        wait_s: the deadline of `connect`, which leaves time to name the cause.
        hint: advice that the message adds if `connect` fails.

    Raises:
        DeadlineError, RankFailedError: some rank could not connect.
    """
    begin_s = time.monotonic()
    try:
        group = connect()
    except RuntimeError as error:
        ran_out = time.monotonic() - begin_s >= wait_s
        error_class, within = (DeadlineError, f" within {timeout_s:g} s") if ran_out else (RankFailedError, "")
        message = f"rank {rank} of {size} could not connect to the others{within}: {first_line(error)}{hint}"
        with contextlib.suppress(RuntimeError):  # the store may be gone with its host
            store.set(f"connected/{rank}", message)
        raise error_class(message) from error
    store.set(f"connected/{rank}", "")
    _await_all(store, "connected", rank, size, timeout_s, "connect")
    for message in filter(None, _texts(store, "connected", size)):
        raise RankFailedError(message)
    store.set(f"joined/{rank}", "")
    if rank == 0:  # rank 0 may host the store, so it stays until the other ranks have read
        _await_all(store, "joined", rank, size, timeout_s, "join")
    return group


def have_gloo_listen(address: tuple[str, int], *, locally: bool) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches `address`, unless the user has set it.

    By default gloo listens on the address of the machine's own name, which may be the loopback, or a network from which
    anyone may connect.

    Args:
        locally: use the loopback, because all ranks are on this machine.
    """
    here = LOOPBACK
    if not locally:
        with socket.create_connection(address, GRACE_S) as connection:
            here = connection.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if here in (entry.address for entry in addresses) and ipaddress.ip_address(here).is_loopback == locally:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _texts(store: dist.Store, key: str, size: int) -> list[str]:
    """Return each rank's text under `key`, in one request, because W ranks read them at the same time."""
    return [text.decode() for text in store.multi_get([f"{key}/{rank}" for rank in range(size)])]


def _await_all(store: dist.Store, key: str, rank: int, size: int, timeout_s: float, to: str) -> None:
    """Wait until every rank has set its `key`. `to` is the awaited action in messages, such as "connect"."""
    begin_s = time.monotonic()
    try:
        store.wait([f"{key}/{r}" for r in range(size)], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if time.monotonic() - begin_s < timeout_s:
            raise WorldError(
                f"rank {rank} of {size} lost the store as it waited for the others to {to}: {first_line(error)}"
            ) from error
        absent = [r for r in range(size) if not store.check([f"{key}/{r}"])]
        raise DeadlineError(f"rank {rank} of {size} waited {timeout_s:g} s for {some_ranks(absent)} to {to}") from error
