"""The machine that a plan is for: this machine, or a machine that is described by settings alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from zero.core.offload import Offload
from zero.core.placement import Room, budget_bytes, usable_bytes, usable_host_bytes
from zero.core.sizes import GiB, size_text
from zero.core.suggest import meant
from zero.distributed.transport import Transport
from zero.distributed.world import World
from zero.errors import ConfigError, WorldError
from zero.platform.cuda import compute_device
from zero.platform.device import Device
from zero.platform.gpu_peaks import PEAKS, Peak, peak_of
from zero.platform.handle import Done, Handle
from zero.platform.host_memory import free_host_bytes
from zero.platform.run_files import folders_of, free_by_file_system
from zero.trainer.config import Config

NODE_RANKS = 8
"""Ranks on a node of a described machine, unless `plan.ranks_per_node` is set."""


class Paper(Transport):
    """Rank 0 of ranks that do not exist, so collectives raise WorldError."""

    def __init__(self, size: int, *, local_size: int, device: Literal["cuda", "cpu"]) -> None:
        super().__init__(0, size, device=device, timeout_s=1.0)
        self.local_size = local_size

    def _refuse(self, *arguments: Any, **_: Any) -> Handle:
        raise WorldError(f"{arguments[-1]}: a world on paper has no other ranks")

    gather = all_to_all = reshard = reduce_scatter = broadcast = _refuse

    def part(self, ranks: Sequence[int], name: str, *, alike: bool = False) -> Transport:
        return PaperGroup(len(ranks), local_size=len(ranks), device=self.compute.kind)


class PaperGroup(Paper):
    """Rank 0 of a group whose exchanges move nothing, for traces of tensors that have no memory."""

    def all_to_all(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return Done()


class PaperWorld(World):
    """Rank 0 of a world for planning: a size and a device, but no other ranks. Collectives raise WorldError."""

    def __init__(self, size: int, *, local_size: int, device: Literal["cuda", "cpu"]) -> None:
        super().__init__(Paper(size, local_size=local_size, device=device))


@dataclass(frozen=True)
class Machine:
    """The memory and disk of a machine.

    Attributes:
        ranks: number of ranks on all nodes.
        ranks_per_node: number of ranks that share `host_bytes` and `disk_bytes`.
        device_bytes: bytes free on the GPU of each rank; 0 if the CPU computes.
        host_bytes, disk_bytes: bytes free on each node, for all its ranks together.
        paper: whether some numbers were described in settings instead of read here, so that nothing can be measured.
        links: measured rates between ranks, by their names in `Rates`.
    """

    ranks: int
    ranks_per_node: int
    device: Literal["cuda", "cpu"]
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    paper: bool = False
    links: dict[str, float] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(config: Config, world: World) -> "Machine":
        """Return this machine with the memory and disk that the ranks of a running world may take. Collective.

        The smallest numbers of any rank count.
        """
        on_host = usable_host_bytes(config.offload, free_host_bytes(), device_is_host=world.compute.shares_memory)
        here = (_usable_bytes(config, world.compute), on_host, _disk_bytes(config))
        least = world.exchange(torch.tensor(here, device="cpu"), what="free memory").amin(dim=0).tolist()
        return Machine(world.size, world.local_size, world.compute.kind, *least)

    @staticmethod
    def described(config: Config) -> "Machine":
        """Return the machine that the settings `plan.*` describe; numbers that are auto are read from this machine.

        A machine with a `plan.gpu` or `plan.device_memory` has GPUs.

        Raises:
            ConfigError: `plan.gpu` is not known, `plan.pcie` is set for a machine without GPUs, or `launch.ranks` are
                the ranks of one machine, and this one has fewer GPUs.
        """
        plan, launched, gpu = config.plan, config.launch.ranks, described_gpu(config)
        on_paper = plan.device_memory != "auto" or gpu is not None
        on_gpus = not on_paper and config.launch.device != "cpu" and torch.cuda.is_available()
        here = torch.cuda.device_count() if on_gpus else 1
        if plan.ranks == "auto" and launched != "auto" and on_gpus and launched > here:
            raise ConfigError(
                f"launch.ranks={launched}: this machine has {here} GPUs. Use plan.ranks={launched} to plan for others."
            )
        on_one_node = here if launched == "auto" else launched
        ranks, per_node = (on_one_node, on_one_node) if plan.ranks == "auto" else (plan.ranks, NODE_RANKS)
        per_node = min(ranks, per_node if plan.ranks_per_node == "auto" else plan.ranks_per_node)
        device: Literal["cuda", "cpu"] = "cuda" if on_paper or on_gpus else "cpu"
        if plan.pcie is not None and device == "cpu":
            raise ConfigError(f"plan.pcie={plan.pcie} is for a machine with GPUs. Set plan.gpu as well.")
        device_bytes, host_bytes, disk_bytes = plan.device_memory, plan.host_memory, plan.disk
        if gpu is not None and device_bytes == "auto":
            device_bytes = int(gpu.gib * GiB)
        paper = plan.pcie is not None or any(
            value != "auto" for value in (plan.ranks, device_bytes, host_bytes, disk_bytes)
        )
        if device_bytes == "auto":
            device_bytes = _usable_bytes(config, compute_device(torch.device(device)))
        if host_bytes == "auto":
            host_bytes = usable_host_bytes(config.offload, free_host_bytes(), device_is_host=device == "cpu")
        if disk_bytes == "auto":
            disk_bytes = _disk_bytes(config)
        return Machine(ranks, per_node, device, device_bytes, host_bytes, disk_bytes, paper=paper)

    @property
    def room(self) -> Room:
        """Memory and disk of one rank: its share of the node's."""
        return Room(self.device_bytes, self.host_bytes // self.ranks_per_node, self.disk_bytes // self.ranks_per_node)

    def limit_bytes(self, offload: Offload) -> int:
        """Return the bytes that a rank may take where it computes: on its device, or in host memory on a CPU."""
        if self.device == "cuda":
            return budget_bytes(offload.device_budget, self.room.device)
        return budget_bytes(offload.host_budget, self.room.host)

    @property
    def world(self) -> World:
        """A world of the machine's size for planning, without other ranks."""
        return PaperWorld(self.ranks, local_size=self.ranks_per_node, device=self.device)

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        nodes = -(-self.ranks // self.ranks_per_node)
        where = f"{ranks} on {nodes} node{'s' * (nodes > 1)}"
        device = f"{size_text(self.device_bytes)} on each GPU, " if self.device == "cuda" else ""
        host, disk = size_text(self.host_bytes), size_text(self.disk_bytes)
        return f"{where}; {'described or free' if self.paper else 'free now'}: {device}{host} host memory, {disk} disk"


def described_gpu(config: Config) -> Peak | None:
    """Return the GPU that `plan.gpu` names; None if it names none.

    Raises:
        ConfigError: the GPU is not in `PEAKS`.
    """
    name = config.plan.gpu
    if name is None:
        return None
    short = _compact(name)
    peak = peak_of(name) or next((peak for peak in PEAKS if _compact(peak.words) in (short, f"RTX{short}")), None)
    if peak is None:
        known = [peak.words for peak in PEAKS]
        hint = meant(name.upper(), known) or f". Choose from {', '.join(known)}."
        raise ConfigError(f"plan.gpu={name} is not known{hint}")
    return peak


def _compact(name: str) -> str:
    return name.upper().replace(" ", "")


def _usable_bytes(config: Config, device: Device) -> int:
    return usable_bytes(config.offload, device.free_bytes(), device.total_bytes())


def _disk_bytes(config: Config) -> int:
    """Add up the bytes free at `offload.path`, over all its folders that exist."""
    folders = [folder for folder in folders_of(config.offload.paths) if folder.is_dir()]
    return sum(free_bytes for _, free_bytes in free_by_file_system(folders))
