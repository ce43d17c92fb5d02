"""The settings of `offload`, and the tier (device, host memory, disk) of each kind of state and of each page.

An `Offload` has a tier, or `auto`, for each kind of state. `place` turns these settings, sizes and budgets into one
tier for the parameters, one for the gradients, and one for every page of master and moments.

Pages of master and moments are visited once per step in a fixed cyclic order, so a cache of the last pages would never
hit: pages that fit stay, the others stream. The earliest pages get the fastest tier, because the first unit of forward
has no compute before it to hide a read behind.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
section 5.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from zero.core.schema import Section
from zero.core.setting_types import Places, bytes_of, key, memory_of, or_auto, whole_or_auto
from zero.core.sizes import BLOCK_BYTES, GiB, size_text
from zero.errors import ConfigError, SettingError

Tier = Literal["device", "host", "nvme"]

TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
"""Fastest first."""

IF_SHARDED = "cpu_if_sharded"
"""The setting of presets for parameters: cpu at the stage that shards them, else none."""

PRESETS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "none": ("none", "none", "none"),
        "cpu": ("cpu", IF_SHARDED, "cpu"),
        "nvme": ("nvme", IF_SHARDED, "cpu"),
        "infinity": ("nvme", "nvme", "nvme"),
        "auto": ("auto", "auto", "auto"),
    }
)
"""Name -> the settings of (optimizer, param, grad)."""

HOST_SHARE = 0.9
"""The default share of a machine's free memory beside a GPU. It is pinned, so data, checkpoints and libraries need the
rest.
"""

_TIER_OF: Mapping[str, Tier] = MappingProxyType({"none": "device", "cpu": "host", "nvme": "nvme"})


# Types of settings: auto is kept as None.


def _page(value: object) -> int:
    nbytes = bytes_of(value)
    if not BLOCK_BYTES <= nbytes <= GiB or nbytes % BLOCK_BYTES:
        raise ValueError("must be a positive multiple of 4KiB, at most 1GiB")
    return nbytes


def _budget(value: object) -> int | float:
    if isinstance(value, str) and (share := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", value)):
        if 0 < float(share[1]) <= 100:
            return float(share[1]) / 100
        raise ValueError
    return bytes_of(value) and memory_of(value)


def _typed(budget: Any) -> Any:
    """Write a number of bytes or a share as text."""
    if type(budget) is float and 0 < budget <= 1:
        return _percent(budget)
    return f"{budget}B" if type(budget) is int and budget >= 0 else budget


def _percent(share: float) -> str:
    return f"{share:.9%}".rstrip("0%").rstrip(".") + "%"


_SIZE_OR_SHARE = "a size such as 8GiB, a share of what is free such as 50%"
Page = Annotated[int | None, or_auto("a size in bytes such as 8MiB or 80GiB, not negative", _page, None)]
Budget = Annotated[
    int | float | None,
    or_auto(_SIZE_OR_SHARE, _budget, None, lambda kept: _percent(kept) if isinstance(kept, float) else kept),
]
Reserve = Annotated[int | None, or_auto("a size such as 80GiB", memory_of, None)]
StoreThreads = Annotated[int | None, whole_or_auto(1, 4096, None)]
ReadAhead = Annotated[int | None, whole_or_auto(0, auto=None)]


class Offload(Section):
    """The tier of each kind of state, and the ways between tiers.

    Presets set `param` to cpu_if_sharded, which is cpu at the stage that shards parameters and none below. An explicit
    `offload.param=cpu` raises below that stage.
    """

    section_key = "offload"

    optimizer: Literal["none", "cpu", "nvme", "auto"] = key(
        "none",
        "master and moments: none (the device), cpu, nvme, or auto (the fastest with room)",
        trades="12 bytes per parameter on the device against their way there once per step, behind the next forward",
        example="cpu",
    )
    param: Literal["none", "cpu", "nvme", "auto", "cpu_if_sharded"] = key(
        "none",
        "parameters, at zero.stage=3; cpu_if_sharded: cpu there, none below",
        trades="memory of the device against a read before every gather",
        example="cpu",
    )
    grad: Literal["none", "cpu", "nvme", "auto"] = key(
        "none",
        "gradients",
        trades="4 bytes per parameter on the device against a write and a read per step",
        example="cpu",
    )
    path: Places | None = key(
        None,
        "folder of the nameless NVMe file; a list of folders: pages are spread over a file in each, in proportion to "
        "their measured rates, as far as each has room; null: the current folder. '$NAME', in quotes, is a variable of "
        "each rank, so that nodes may have folders of their own",
        trades="several disks read and write at once; one that fails ends the run",
        example=". offload=nvme",
    )
    page_bytes: Page = key(
        "auto",
        "bytes of one fp32 page, such as 4MiB; a multiple of 4KiB; auto: 4MiB, for large models up to 64MiB",
        alias="page",
        unit="bytes",
        trades="host memory against speed: the arena holds a few pages per thread, disks like large ones",
        example="8MiB",
    )
    threads: StoreThreads = key(
        "auto",
        "threads that read, update and write pages, on all disks together; auto: 4, or 2 where one disk is measured to "
        "be as fast with 2",
        unit="threads",
        example="4",
    )
    read_ahead: ReadAhead = key(
        "auto",
        "pages of each kind that are read before their turn; auto: 2",
        unit="pages",
        trades="host memory against waiting for the disk",
        example="4",
    )
    device_budget: Budget = key(
        "auto",
        "most that a rank holds on the GPU: 60GiB, 75% of what is free, or auto: all that is free",
        unit="bytes",
        example="60GiB",
    )
    reserve_bytes: Reserve = key(
        "auto",
        "of a GPU's free memory, what is left to its libraries, such as 2GiB; auto: 1GiB and a fiftieth of the GPU",
        alias="reserve",
        unit="bytes",
        example="2GiB",
    )
    host_budget: Budget = key(
        "auto",
        "most that a rank holds in host memory: 8GiB, 50% of what is free, or auto: all that is free, 90% beside a GPU",
        unit="bytes",
        example="50%",
    )
    verify: bool = key(
        True,
        "check length, version and CRC-32 of each page that is read from a file",
        trades="about a hundredth of a step against pages that a disk changed in silence",
        example="false",
    )
    pin: bool = key(
        True,
        "lock host buffers for the GPU's copy engines",
        trades="memory that the system cannot take back against copies that run beside compute",
        example="false",
    )
    compute: Literal["device", "host"] = key(
        "device",
        "where offloaded pages are updated: device, or host (the CPU's kernel)",
        trades="host moves gradients and parameters only, and computes on the slower processor",
        example="host",
    )

    def __init__(self, preset: str = "none", **settings: Any) -> None:
        """Check the settings: `Offload("nvme", path="/mnt/nvme", threads=4)`.

        Args:
            preset: "none", "cpu", "nvme", "infinity" or "auto": defaults for `optimizer`, `param` and `grad`.
            **settings: fields of this class; None is the default. A budget is a number of bytes (int) or a share of
                what is free (float).

        Raises:
            SettingError: an unknown word, a page that is not whole blocks, a number that is too small.
        """
        if not isinstance(preset, str) or preset not in PRESETS:
            example = "" if isinstance(preset, str) else '; or write offload=zero.Offload(optimizer="cpu")'
            raise SettingError(f"offload={preset}: must be one of {', '.join(PRESETS)}{example}")
        values = dict(zip(("optimizer", "param", "grad"), PRESETS[preset], strict=True))
        values |= {name: value for name, value in settings.items() if value is not None}
        exact = ("device_budget", "host_budget", "reserve_bytes")
        super().__init__(**{name: _typed(value) if name in exact else value for name, value in values.items()})

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the folders for files, one or more, as they were typed."""
        return (self.path or ".",) if self.path is None or isinstance(self.path, str) else self.path

    @property
    def kinds(self) -> tuple[str, str, str]:
        """Return the settings of (optimizer, param, grad)."""
        return self.optimizer, self.param, self.grad

    def budget(self, tier: Tier) -> int | float | None:
        """Return the budget of a memory."""
        return self.device_budget if tier == "device" else self.host_budget

    def at(self, *, parameters_sharded: bool) -> Offload:
        """Replace presets' settings by those of a stage: none, cpu, nvme and auto remain.

        Raises:
            ConfigError: parameters leave the device where every rank needs them whole.
        """
        if parameters_sharded:
            return self.model_copy(update={"param": "cpu"}) if self.param == IF_SHARDED else self
        if self.param in ("none", "auto", IF_SHARDED):
            return self.model_copy(update={"param": "none"})
        infinity = self.kinds == PRESETS["infinity"]
        setting = "offload=infinity" if infinity else f"offload.param={self.param}"
        instead = "offload=nvme" if infinity else "offload.param=none"
        where = "on disk" if self.param == "nvme" else "on the host"
        raise ConfigError(
            f"{setting} keeps parameters {where}, which only zero.stage=3 can. Use zero.stage=3, or {instead}."
        )


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
        limit_bytes, needs_bytes = limits[memory[0]], sum(used[tier] for tier in memory)
        if needs_bytes > limit_bytes:
            active_bytes = activation_bytes if "device" in memory else 0
            inside = {key: sizes[key] for key, tier in fixed.items() if tier in memory and sizes[key]}
            movable = [key for key in inside if key != "param" or parameters_sharded]
            ways = _ways_out(offload, memory, movable, bool(inside), resorts) if active_bytes <= limit_bytes else []
            raise DoesNotFit(
                f"{_limit(offload, memory[0], limit_bytes)}: a rank needs at least {size_text(needs_bytes)} there: "
                f"{_summands(needs_bytes, inside, active_bytes)}",
                [*_raised(offload, memory[0], limit_bytes), *ways],
                needs_bytes=needs_bytes,
                activation_bytes=active_bytes,
            )

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


def _summands(needs_bytes: int, inside: Mapping[str, int], active_bytes: int) -> str:
    words = {"optimizer": "master and moments", "param": "parameters", "grad": "gradients"}
    parts = [f"{size_text(needs_bytes - sum(inside.values()) - active_bytes)} of buffers (their smallest number)"]
    parts += [f"{size_text(inside[key])} of {word}" for key, word in words.items() if key in inside]
    return " + ".join(parts + [f"{size_text(active_bytes)} of activations"] * bool(active_bytes))


def _ways_out(
    offload: Offload, memory: Sequence[Tier], movable: Sequence[str], holds_state: bool, resorts: Sequence[str]
) -> list[str]:
    """List what helps where a memory, of one tier or of both, is too small."""
    target = "cpu" if memory == ("device",) else "nvme"
    moves = [f"set offload.{key}={target}" for key in movable]
    if memory == ("host",) and not holds_state and offload.page_bytes != BLOCK_BYTES:
        moves = ["set offload.page smaller"]  # only slots that pages pass through are there
    return [*moves[:1], *resorts]


def _raised(offload: Offload, tier: Tier, limit_bytes: int) -> list[str]:
    budget = offload.budget(tier)
    is_limit = budget == limit_bytes if isinstance(budget, int) else budget is not None and budget < 1
    return [f"raise offload.{tier}_budget"] * is_limit


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


def budget_text(budget: int | float) -> str:
    """Write a budget as a user may type it."""
    return size_text(budget) if isinstance(budget, int) else _percent(budget)
