"""The tier (device, host memory or disk) of each kind of state and of each unit's pages.

`place` turns the settings of `Offload`, sizes and budgets into one tier for the parameters, one for the gradients, and
one for every page of master and moments.

Every step visits the pages of master and moments once, in a fixed cyclic order, so a cache of the latest pages would
never hit. Therefore pages that fit on a tier stay there, and the others are read and written in every step. The
earliest pages get the fastest tier, because no compute before the first unit of forward can hide a read.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section
5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from zero.core.offload import Offload, budget_text
from zero.core.sizes import BLOCK_BYTES, GiB, size_text
from zero.errors import ConfigError

Tier = Literal["device", "host", "nvme"]

TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
"""The tiers, fastest first."""

HOST_SHARE = 0.9
"""The share of a machine's free host memory that is used by default on a machine with a GPU.

This memory is pinned, so data, checkpoints and libraries need the rest.
"""

_TIER_OF: Mapping[str, Tier] = MappingProxyType({"none": "device", "cpu": "host", "nvme": "nvme"})


class Room(NamedTuple):
    """Bytes of each memory that one rank may still use."""

    device: int
    host: int
    disk: int | None = None
    """None: unknown until the file is created."""


NO_LIMIT = Room(2**62, 2**62)
"""Unlimited room, for a plan that only counts bytes."""


@dataclass(frozen=True)
class Placement:
    """The tier of each kind of state on one rank.

    Attributes:
        optimizer: (unit, number) of a page group -> tier of its master and moments, in the order of visits.
        bytes: tier -> bytes that the rank uses there, fixed buffers included.
    """

    param: Tier
    grad: Tier
    optimizer: Mapping[tuple[int, int], Tier]
    bytes: Mapping[Tier, int]


class DoesNotFit(ConfigError):
    """Error of a plan that needs more of a memory than there is.

    Attributes:
        problem: text with the memory, its limit, and the bytes that are needed.
        ways: texts of remedies, the easiest first.
        needs_bytes: bytes that must be in the memory, all together.
        activation_bytes: bytes of activations among them.
    """

    def __init__(self, problem: str, ways: Sequence[str], *, needs_bytes: int, activation_bytes: int) -> None:
        self.problem, self.ways, self.needs_bytes, self.activation_bytes = problem, ways, needs_bytes, activation_bytes
        advice = ", or ".join(ways or ["use a machine with more memory"])
        super().__init__(f"{problem}. {advice[0].upper()}{advice[1:]}.")


def place(
    offload: Offload,
    groups: Sequence[tuple[int, int, int]],
    *,
    param_bytes: int,
    grad_bytes: int,
    device_fixed_bytes: int,
    host_fixed_bytes: int,
    device_bytes: int,
    host_bytes: int,
    device_is_host: bool,
    activation_bytes: int = 0,
    resorts: Sequence[str] = ("use more ranks",),
    parameters_sharded: bool = True,
    disk_bytes: int | None = None,
) -> Placement:
    """Choose a tier for parameters, gradients and every page group.

    Kinds of state with a tier in the settings are counted first. Then those set to `auto` take the fastest tier that
    has room, in this order: parameters, gradients, page groups. When a group does not fit on a tier, no later group
    uses that tier, so no group is on a faster tier than an earlier one.

    Args:
        offload: settings that `Offload.at` returned.
        groups: (unit, number, bytes of master and moments) in the order in which a step visits them.
        param_bytes, grad_bytes: bytes of this rank's parameters and gradients between two uses.
        device_fixed_bytes, host_fixed_bytes: bytes of buffers.
        activation_bytes: bytes of activations of forward and backward on the device.
        resorts: remedies for the error message that lower every need: one at least.
        parameters_sharded: whether parameters may leave the device.
        device_bytes, host_bytes: the budgets as numbers of bytes, see `budget_bytes`.
        device_is_host: True if the CPU computes. There is one memory then: all state counts against `host_bytes`, and
            `auto` calls its tier "host".
        disk_bytes: free bytes on the disk; None if unknown.

    Raises:
        DoesNotFit: buffers, activations and the kinds of state with a tier in the settings do not fit in a memory.
        ConfigError: the disk is too small, or the CPU computes and `offload.device_budget` is set.
    """
    if device_is_host and offload.device_budget is not None:
        raise ConfigError(
            f"offload.device_budget={budget_text(offload.device_budget)}: without a GPU there is only host memory. "
            "Set offload.host_budget."
        )
    sizes = {"optimizer": sum(size for _, _, size in groups), "grad": grad_bytes, "param": param_bytes}
    fixed = {key: _TIER_OF[setting] for key in sizes if (setting := getattr(offload, key)) != "auto"}
    used = Counter({"device": device_fixed_bytes + activation_bytes, "host": host_fixed_bytes, "nvme": 0})
    for kind, tier in fixed.items():
        used[tier] += sizes[kind]
    memories: tuple[tuple[Tier, ...], ...] = (("host", "device"),) if device_is_host else (("device",), ("host",))
    limits: dict[Tier, int] = {"device": device_bytes, "host": host_bytes}
    for memory in memories:
        needs_bytes = sum(used[tier] for tier in memory)
        if needs_bytes > limits[memory[0]]:
            active_bytes = activation_bytes if "device" in memory else 0
            inside = {kind: sizes[kind] for kind, tier in fixed.items() if tier in memory and sizes[kind]}
            movable = [kind for kind in inside if kind != "param" or parameters_sharded]
            raise _does_not_fit(offload, memory, limits[memory[0]], needs_bytes, active_bytes, inside, movable, resorts)

    def has_room(tier: Tier, size: int) -> bool:
        if tier == "nvme":
            return True
        memory = next((memory for memory in memories if memory[0] == tier), ())
        return bool(memory) and sum(used[tier] for tier in memory) + size <= limits[tier]

    def take(size: int, tiers: Sequence[Tier]) -> Tier:
        tier = next(tier for tier in tiers if has_room(tier, size))
        used[tier] += size
        return tier

    param, grad = (fixed[key] if key in fixed else take(sizes[key], TIERS) for key in ("param", "grad"))
    optimizer: dict[tuple[int, int], Tier] = {}
    fastest: Tier = "device"
    for unit, number, size in groups:
        fastest = fixed["optimizer"] if "optimizer" in fixed else take(size, TIERS[TIERS.index(fastest) :])
        optimizer[unit, number] = fastest
    if disk_bytes is not None and used["nvme"] > disk_bytes:
        raise ConfigError(
            f"offload.path has {size_text(disk_bytes)} free for a rank, but a rank needs {size_text(used['nvme'])}. "
            f"{', or '.join(['Give an offload.path with more space', *resorts])}, or offload less."
        )
    return Placement(param, grad, optimizer, {tier: used[tier] for tier in TIERS})


def _does_not_fit(
    offload: Offload,
    memory: Sequence[Tier],
    limit_bytes: int,
    needs_bytes: int,
    active_bytes: int,
    inside: Mapping[str, int],
    movable: Sequence[str],
    resorts: Sequence[str],
) -> DoesNotFit:
    """Return the error for a memory that is too small; on a CPU one memory has two tiers.

    Args:
        inside: bytes of each kind of state that must be in this memory, included in `needs_bytes`.
        movable: the kinds of state that may move to a slower tier.
    """
    words = {"optimizer": "master and moments", "param": "parameters", "grad": "gradients"}
    parts = [f"{size_text(needs_bytes - sum(inside.values()) - active_bytes)} of buffers (their smallest number)"]
    parts += [f"{size_text(inside[kind])} of {word}" for kind, word in words.items() if kind in inside]
    parts += [f"{size_text(active_bytes)} of activations"] * bool(active_bytes)
    name, budget = memory[0], offload.budget(memory[0])
    is_limit = budget == limit_bytes if isinstance(budget, int) else budget is not None and budget < 1
    ways = [f"raise offload.{name}_budget"] * is_limit
    if active_bytes <= limit_bytes:  # otherwise only smaller activations help
        moves = [f"set offload.{kind}={'cpu' if memory == ('device',) else 'nvme'}" for kind in movable]
        if memory == ("host",) and not inside and offload.page_bytes != BLOCK_BYTES:
            moves = ["set offload.page smaller"]  # the memory holds only slots for pages in transfer
        ways += [*moves[:1], *resorts]
    return DoesNotFit(
        f"{_limit(offload, name, limit_bytes)}: a rank needs at least {size_text(needs_bytes)} there: "
        f"{' + '.join(parts)}",
        ways,
        needs_bytes=needs_bytes,
        activation_bytes=active_bytes,
    )


def _limit(offload: Offload, tier: Tier, limit_bytes: int) -> str:
    budget = offload.budget(tier)
    if budget is None:
        return f"{tier} memory has {size_text(limit_bytes)} free"
    leaves = "" if budget == limit_bytes else f" leaves {size_text(limit_bytes)}"
    return f"offload.{tier}_budget={budget_text(budget)}{leaves}"


def usable_bytes(offload: Offload, free_bytes: int, total_bytes: int) -> int:
    """Return the bytes of a GPU's free memory for tensors; cuBLAS, NCCL and fragmentation need the rest."""
    auto = GiB + total_bytes // 50
    return max(0, free_bytes - (auto if offload.reserve_bytes is None else offload.reserve_bytes))


def usable_host_bytes(offload: Offload, free_bytes: int, *, device_is_host: bool) -> int:
    """Return the bytes of a machine's free memory for tensors, see `HOST_SHARE`."""
    return free_bytes if device_is_host or offload.host_budget is not None else int(HOST_SHARE * free_bytes)


def budget_bytes(budget: int | float | None, free_bytes: int) -> int:
    """Return a budget in bytes, at most `free_bytes`.

    Args:
        budget: bytes (int), a share of the free bytes (float), or None for all of them.
    """
    if budget is None:
        return free_bytes
    return min(budget if isinstance(budget, int) else int(budget * free_bytes), free_bytes)
