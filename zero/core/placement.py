"""The tier (device, host memory, disk) of each kind of state and of each page.

`place` turns the settings of `Offload`, sizes and budgets into one tier for the parameters, one for the gradients, and
one for every page of master and moments.

Pages of master and moments are visited once per step in a fixed cyclic order, so a cache of the last pages would never
hit: pages that fit stay, the others stream. The earliest pages get the fastest tier, because the first unit of forward
has no compute before it to hide a read behind.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
section 5.
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
"""Fastest first."""

HOST_SHARE = 0.9
"""The default share of a machine's free memory beside a GPU. It is pinned, so data, checkpoints and libraries need the
rest.
"""

_TIER_OF: Mapping[str, Tier] = MappingProxyType({"none": "device", "cpu": "host", "nvme": "nvme"})


class Room(NamedTuple):
    """Bytes that one rank may still take."""

    device: int
    host: int
    disk: int | None = None
    """None: unknown until the file is made."""


NO_LIMIT = Room(2**62, 2**62)
"""Room for a plan that only counts."""


@dataclass(frozen=True)
class Placement:
    """The tier of everything on one rank.

    Attributes:
        optimizer: (unit, number) of a page group -> tier of its master and moments, in visiting order.
        bytes: tier -> bytes there, fixed buffers included.
    """

    param: Tier
    grad: Tier
    optimizer: Mapping[tuple[int, int], Tier]
    bytes: Mapping[Tier, int]


class DoesNotFit(ConfigError):
    """A plan that needs more of a memory than there is.

    Attributes:
        problem: the memory, its limit and the needs, in words.
        ways: advice, the easiest first.
        needs_bytes: of everything that has to be in the memory.
        activation_bytes: of these, activations.
    """

    def __init__(self, problem: str, ways: Sequence[str], *, needs_bytes: int, activation_bytes: int) -> None:
        self.problem, self.ways, self.needs_bytes, self.activation_bytes = problem, ways, needs_bytes, activation_bytes
        super().__init__(f"{problem}; {', or '.join(ways or ['use a machine with more memory'])}")


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
    """Choose a tier for everything.

    Kinds with a tier of their own are counted first; then what is `auto` takes the fastest tier that has room:
    parameters, gradients, page groups in order. A group that finds a tier full closes it for the groups after it, so
    no group is on a faster tier than an earlier one.

    Args:
        offload: as `Offload.at` resolved it.
        groups: (unit, number, bytes of master and moments) in the order in which a step visits them.
        param_bytes, grad_bytes: of this rank between two uses.
        device_fixed_bytes, host_fixed_bytes: buffers.
        activation_bytes: of forward and backward on the device.
        resorts: advice that lowers every need: one at least.
        parameters_sharded: False keeps parameters on the device.
        device_bytes, host_bytes: the budgets as numbers, see `budget_bytes`.
        device_is_host: the CPU computes. Then there is one memory: all of it counts against `host_bytes`, and `auto`
            calls it "host".
        disk_bytes: free on the disk; None if unknown.

    Raises:
        DoesNotFit: a memory is too small for everything without a choice.
    """
    if device_is_host and offload.device_budget is not None:
        raise ConfigError(
            f"offload.device_budget={budget_text(offload.device_budget)}: the CPU computes here and there is one "
            "memory. Set offload.host_budget."
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
            f"offload.path has {size_text(disk_bytes)} free for a rank, which needs "
            f"{size_text(used['nvme'])} there; {', or '.join(['give an offload.path with more space', *resorts])}, "
            "or offload less"
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
    """Phrase the error for a memory, of one tier or of both, that is too small.

    Args:
        inside: the bytes in `needs_bytes` of each kind of state with this tier.
        movable: the kinds that may leave.
    """
    words = {"optimizer": "master and moments", "param": "parameters", "grad": "gradients"}
    parts = [f"{size_text(needs_bytes - sum(inside.values()) - active_bytes)} of buffers (their smallest number)"]
    parts += [f"{size_text(inside[kind])} of {word}" for kind, word in words.items() if kind in inside]
    parts += [f"{size_text(active_bytes)} of activations"] * bool(active_bytes)
    name, budget = memory[0], offload.budget(memory[0])
    is_limit = budget == limit_bytes if isinstance(budget, int) else budget is not None and budget < 1
    ways = [f"raise offload.{name}_budget"] * is_limit
    if active_bytes <= limit_bytes:  # else nothing but smaller activations helps
        moves = [f"set offload.{kind}={'cpu' if memory == ('device',) else 'nvme'}" for kind in movable]
        if memory == ("host",) and not inside and offload.page_bytes != BLOCK_BYTES:
            moves = ["set offload.page smaller"]  # only slots that pages pass through are there
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
    """Return the part of a GPU's free memory for tensors: cuBLAS, NCCL and gaps between tensors need the rest."""
    auto = GiB + total_bytes // 50
    return max(0, free_bytes - (auto if offload.reserve_bytes is None else offload.reserve_bytes))


def usable_host_bytes(offload: Offload, free_bytes: int, *, device_is_host: bool) -> int:
    """Return the part of a machine's free memory for tensors: see `HOST_SHARE`."""
    return free_bytes if device_is_host or offload.host_budget is not None else int(HOST_SHARE * free_bytes)


def budget_bytes(budget: int | float | None, free_bytes: int) -> int:
    """Return a budget, bytes or a share of what is free, as a number that is at most what is free."""
    if budget is None:
        return free_bytes
    return min(budget if isinstance(budget, int) else int(budget * free_bytes), free_bytes)
