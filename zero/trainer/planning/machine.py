"""The machine that a plan is for: this one, or one that nobody here sits at.

A paper machine is numbers alone: nothing of it is asked of this one, least of all of its GPU.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from zero.core.placement import Room, size_text, usable_bytes, usable_host_bytes
from zero.distributed.world import Handle, World
from zero.errors import ConfigError, WorldError
from zero.platform.cuda import compute_device
from zero.platform.device import Device, free_host_bytes
from zero.trainer.config import Config

NODE_RANKS = 8
"""Ranks that share one host memory at most, where nobody says how many."""


class PaperWorld(World):
    """Rank 0 of a world that exists on paper: it has a size and a device, and talks to nobody."""

    def __init__(self, size: int, *, local_size: int, device: Literal["cuda", "cpu"]) -> None:
        super().__init__(0, size, device=device, timeout_s=1.0)
        self.local_size = local_size

    def _gather(self, shard_S: Any, full_P: Any, op: str, *, aside: bool = False) -> Handle:
        raise self._nobody(op)

    def _exchange(self, full_P: Any, recv_P: Any, op: str) -> Handle:
        raise self._nobody(op)

    def _broadcast(self, flat: Any, source: int, op: str) -> Handle:
        raise self._nobody(op)

    def _nobody(self, op: str) -> WorldError:
        return WorldError(f"{op}: a world on paper has no ranks to talk to")


@dataclass(frozen=True)
class Machine:
    """How much there is to take.

    Attributes:
        ranks: in all.
        ranks_per_node: that share `host_bytes` and `disk_bytes`.
        device_bytes: free on the GPU of each rank; 0 where the CPU computes.
        host_bytes, disk_bytes: free on each node, for all its ranks together.
        paper: some of it was asked for and not read here, so nothing can be measured.
    """

    ranks: int
    ranks_per_node: int
    device: Literal["cuda", "cpu"]
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    paper: bool = False

    @staticmethod
    def here(config: Config, ranks: int) -> "Machine":
        """This machine, for `ranks` ranks on it, as far as it is free now."""
        device: Literal["cuda", "cpu"] = "cuda" if _has_gpus(config) else "cpu"
        return Machine(
            ranks,
            ranks,
            device,
            _usable_bytes(config, compute_device(torch.device(device))),
            _usable_host_bytes(config, on_gpu=device == "cuda"),
            _disk_bytes(config),
        )

    @staticmethod
    def of(config: Config, world: World) -> "Machine":
        """What the ranks of a running world may take; all go by the one that has least. Collective."""
        on_host = _usable_host_bytes(config, on_gpu=not world.compute.shares_memory)
        mine = (_usable_bytes(config, world.compute), on_host, _disk_bytes(config))
        told = world.gather_texts(" ".join(map(str, mine)), "free memory")
        least = (min(column) for column in zip(*(map(int, text.split()) for text in told), strict=True))
        return Machine(world.size, world.local_size, world.compute.kind, *least)

    @staticmethod
    def asked(config: Config) -> "Machine":
        """What `plan.*` says, and where it says auto, this machine. Asked for `plan.device_memory`, it has GPUs.

        Raises:
            ConfigError: `launch.ranks` are the ranks of one machine, and this one has fewer GPUs.
        """
        wish, asked = config.plan, config.launch.ranks
        on_paper = wish.device_memory != "auto"
        on_gpus = not on_paper and _has_gpus(config)
        here = torch.cuda.device_count() if on_gpus else 1
        if wish.ranks == "auto" and asked != "auto" and on_gpus and asked > here:
            raise ConfigError(f"launch.ranks={asked}: there are {here} GPUs here; plan.ranks={asked} plans for others")
        on_one_node = here if asked == "auto" else asked
        ranks, per_node = (on_one_node, on_one_node) if wish.ranks == "auto" else (wish.ranks, NODE_RANKS)
        per_node = min(ranks, per_node if wish.ranks_per_node == "auto" else wish.ranks_per_node)
        device: Literal["cuda", "cpu"] = "cuda" if on_paper or on_gpus else "cpu"
        device_bytes = wish.device_memory
        if device_bytes == "auto":
            device_bytes = _usable_bytes(config, compute_device(torch.device(device)))
        return Machine(
            ranks,
            per_node,
            device,
            device_bytes,
            _usable_host_bytes(config, on_gpu=device == "cuda") if wish.host_memory == "auto" else wish.host_memory,
            _disk_bytes(config) if wish.disk == "auto" else wish.disk,
            paper=any(one != "auto" for one in (wish.ranks, wish.device_memory, wish.host_memory, wish.disk)),
        )

    @property
    def room(self) -> Room:
        """What one rank may take: of a node's memory and disk, its share."""
        return Room(self.device_bytes, self.host_bytes // self.ranks_per_node, self.disk_bytes // self.ranks_per_node)

    @property
    def world(self) -> PaperWorld:
        """Its rank 0, to plan with."""
        return PaperWorld(self.ranks, local_size=self.ranks_per_node, device=self.device)

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        nodes = -(-self.ranks // self.ranks_per_node)
        where = f"{ranks} on {nodes} node{'s' * (nodes > 1)}"
        device = f"{size_text(self.device_bytes)} on each GPU, " if self.device == "cuda" else ""
        host, disk = size_text(self.host_bytes), size_text(self.disk_bytes)
        return f"{where}; {'asked or free' if self.paper else 'free now'}: {device}{host} host memory, {disk} disk"


def _usable_bytes(config: Config, device: Device) -> int:
    return usable_bytes(config.offload.asked(), device.free_bytes(), device.total_bytes())


def _usable_host_bytes(config: Config, *, on_gpu: bool) -> int:
    return usable_host_bytes(config.offload.asked(), free_host_bytes(), device_is_host=not on_gpu)


def _has_gpus(config: Config) -> bool:
    return config.launch.device != "cpu" and torch.cuda.is_available()


def _disk_bytes(config: Config) -> int:
    """Free where `offload.path` says; 0 where there is no such folder."""
    folder = Path(config.offload.path or ".").expanduser()
    return shutil.disk_usage(folder).free if folder.is_dir() else 0
