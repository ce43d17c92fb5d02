"""Opening of a run's connections, and checks that the worlds which the ranks open fit together."""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from zero.distributed.agreement import Hosts
from zero.distributed.mesh import check_started
from zero.distributed.process_group import default_group, open_group_of_one
from zero.distributed.rendezvous import check_environment, env_int
from zero.distributed.transport import Processes, Solo, Transport
from zero.errors import ConfigError
from zero.platform.cuda import claim_device

_OPENING = threading.Lock()
"""Lock for opening torch's default process group, because ranks may be threads."""


def open_transport(timeout_s: float = 300.0, device: str | None = None) -> Transport:
    """Open the transport that torchrun's environment describes, see `zero.open_world`."""
    if device is not None and str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f'device={device}: must be cpu or cuda. Write zero.open_world(device="cuda")')
    size = env_int("WORLD_SIZE", "1")
    if size > 1:
        check_environment()
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"srun has started {tasks} tasks without RANK and WORLD_SIZE, and each would be a world of its own. Start "
            "torchrun in one task per node, or set WORLD_SIZE=1."
        )
    here = claim_device(device, env_int("LOCAL_RANK", "0"))
    return Processes(here, timeout_s=timeout_s) if size > 1 else Solo(here, timeout_s=timeout_s)


def open_default_group() -> None:
    """Open torch's default process group, also for a single rank, for scripts that ask torch for their rank."""
    with _OPENING:
        if default_group() is not None:
            return
        transport = open_transport()
        if transport.size == 1:
            open_group_of_one(transport.compute.backend)
        transport.close(keep_default=True)


def open_part(
    ranks: Sequence[int], coordinates: Mapping[str, int], timeout_s: float, device: str | None
) -> tuple[Transport, Transport]:
    """Open the transports of all ranks of the run, and of `ranks`. Collective among all ranks, see `World.from_group`.

    Args:
        coordinates: the place of `ranks` in other dimensions, which no other ranks have.
    """
    for name, place in coordinates.items():
        if not (str(name).isidentifier() and type(place) is int and place >= 0):
            raise ConfigError(f'coordinates: {name!r} is {place!r}. Pass names and whole numbers: {{"tp": 1}}.')
    check_started(env_int("RANK", "0"), env_int("WORLD_SIZE", "1"))
    whole = open_transport(timeout_s, device)
    with ExitStack() as failure:
        hosts = failure.enter_context(Hosts(whole))
        _check_fit(hosts.gather_texts(json.dumps([*ranks, dict(coordinates)], sort_keys=True), "coordinates"))
        part = whole.part(ranks, "a world")
        part.open(priority=False)
        failure.pop_all()
    return whole, part


def _check_fit(texts: Sequence[str]) -> None:
    """Raise ConfigError, on every rank, unless the ranks of all worlds and their coordinates fit together.

    Args:
        texts: by rank of the run, the ranks and the coordinates of its world, in a list of JSON.
    """
    worlds = [(members, coordinates) for *members, coordinates in map(json.loads, sorted({*texts}))]
    if sorted(rank for members, _ in worlds for rank in members) != [*range(len(texts))]:
        raise ConfigError(
            f"group: the ranks have the worlds {', '.join(map(str, worlds))}, but each rank must be in one, with the "
            "same coordinates on all its ranks."
        )
    places = [coordinates for _, coordinates in worlds if coordinates]
    if twice := [place for place in places if places.count(place) > 1]:
        raise ConfigError(f"coordinates: two worlds have {twice[0]}, so their checkpoints would have one name.")
