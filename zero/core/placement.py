"""What `offload` means: the tier (device, host memory, disk) of each kind of state, and of each page.

An `Offload` says what is wanted: for each kind of state a tier, or `auto`. `place` turns that, sizes and budgets into
one tier for the parameters, one for the gradients, and one for every page of master and moments.

Pages of master and moments are visited once per step in a fixed cyclic order, so a cache that keeps what was used last
would never hit: what fits is pinned, the rest streams. The earliest pages get the fastest tier, because the first unit
of forward has no compute before it to hide a read behind.

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
"""Of parameters: cpu at the stage that shards them; elsewhere they stay on the device. What presets ask for."""

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
"""Of a machine's free memory, what is taken beside a GPU where nobody says: it is pinned, so the system gets none of it
back for data, checkpoints and libraries.
"""

_TIER_OF: Mapping[str, Tier] = MappingProxyType({"none": "device", "cpu": "host", "nvme": "nvme"})


# Kinds of settings: where auto is written, None is kept.


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


def _typed(given: Any) -> Any:
    """A number of bytes, or a share, as one types it."""
    if type(given) is float and 0 < given <= 1:
        return _percent(given)
    return f"{given}B" if type(given) is int and given >= 0 else given


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
    """Which tier each kind of state is on, and how it travels.

    Options set `param` to cpu_if_sharded, which is cpu at the stage that shards parameters and none below. So whoever
    writes `offload.param=cpu` means it, and is refused below that stage; whoever writes `offload=cpu` is not.
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
        """As Python writes it: `Offload("nvme", path="/mnt/nvme", threads=4)`.

        Args:
            preset: "none", "cpu", "nvme", "infinity" or "auto"; it gives those of `optimizer`, `param` and `grad` that
                are not among the settings.
            settings: fields of this class; None is the default, where a setting says auto. A budget is a number of
                bytes (int) or a share of what is free (float).

        Raises:
            SettingError: an unknown word, a page that is not whole blocks, a number that is too small.
        """
        if not isinstance(preset, str) or preset not in PRESETS:
            own = "" if isinstance(preset, str) else '; or write offload=zero.Offload(optimizer="cpu")'
            raise SettingError(f"offload={preset}: must be one of {', '.join(PRESETS)}{own}")
        given = dict(zip(("optimizer", "param", "grad"), PRESETS[preset], strict=True))
        given |= {name: value for name, value in settings.items() if value is not None}
        exact = ("device_budget", "host_budget", "reserve_bytes")
        super().__init__(**{name: _typed(value) if name in exact else value for name, value in given.items()})

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def paths(self) -> tuple[str, ...]:
        """Folders where files are made, one or more, as they were given."""
        return (self.path or ".",) if self.path is None or isinstance(self.path, str) else self.path

    @property
    def kinds(self) -> tuple[str, str, str]:
        """The settings of (optimizer, param, grad)."""
        return self.optimizer, self.param, self.grad

    def budget(self, tier: Tier) -> int | float | None:
        """Of a memory, as it was given."""
        return self.device_budget if tier == "device" else self.host_budget

    def at(self, *, parameters_sharded: bool) -> Offload:
        """The same with those kinds only that exist at a stage: no setting but none, cpu, nvme and auto is left.

        Raises:
            ConfigError: parameters were asked to leave the device where every rank needs them whole.
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
            f"{setting} keeps parameters {where}, which only zero.stage=3 can; use zero.stage=3, or {instead}"
        )


class Room(NamedTuple):
    """Bytes that one rank may still take."""

    device: int
    host: int
    disk: int | None = None
    """None: whoever makes the file will see."""


NO_LIMIT = Room(2**62, 2**62)
"""To learn what something takes."""


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
        ways: what to do about it, in words, the easiest first.
        needs_bytes: of all that has to be in the memory.
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
    """Decide where everything is kept.

    Kinds with a tier of their own are counted first; then what is `auto` takes the fastest tier that has room:
    parameters, gradients, page groups in order. A group that finds a tier full closes it for the groups after it, so
    no group is on a faster tier than an earlier one.

    Args:
        offload: as `Offload.at` resolved it.
        groups: (unit, number, bytes of master and moments) in the order in which a step visits them.
        param_bytes, grad_bytes: what this rank keeps of each between two uses.
        device_fixed_bytes, host_fixed_bytes: buffers that are there in any case.
        activation_bytes: what forward and backward need on the device.
        resorts: what helps beside that, in words: one at least.
        parameters_sharded: as the stage says: others keep their parameters on the device.
        device_bytes, host_bytes: the budgets as numbers, see `budget_bytes`.
        device_is_host: the CPU computes. Then there is one memory: all of it counts against `host_bytes`, and `auto`
            calls it "host".
        disk_bytes: what the disk has; None if that is not known.

    Raises:
        DoesNotFit: what has to be in a memory does not fit there.
    """
    kinds = {"param": param_bytes, "grad": grad_bytes, "optimizer": sum(size for _, _, size in groups)}
    fixed = {key: _TIER_OF[setting] for key in kinds if (setting := getattr(offload, key)) != "auto"}
    needs = _Needs(
        buffers={"device": device_fixed_bytes, "host": host_fixed_bytes, "nvme": 0},
        activation_bytes=activation_bytes,
        kinds={key: (tier, kinds[key]) for key, tier in fixed.items()},
    )
    used = Counter({tier: needs.total((tier,)) for tier in TIERS})
    budgets: dict[Tier, int] = {"device": device_bytes, "host": host_bytes}
    if device_is_host and offload.device_budget is not None:
        raise ConfigError(
            f"offload.device_budget={budget_text(offload.device_budget)}: the CPU computes here and there is one "
            "memory; set offload.host_budget"
        )
    memories: tuple[tuple[Tier, ...], ...] = (("host", "device"),) if device_is_host else (("device",), ("host",))
    for tiers in memories:
        limit_bytes = budgets[tiers[0]]
        if needs.total(tiers) > limit_bytes:
            raise DoesNotFit(
                f"{_limit(tiers[0], offload.budget(tiers[0]), limit_bytes)}: a rank needs at least "
                f"{size_text(needs.total(tiers))} there: {needs.text(tiers)}",
                _ways_out(offload, needs, tiers, limit_bytes, resorts, parameters_sharded),
                needs_bytes=needs.total(tiers),
                activation_bytes=needs.active_bytes(tiers),
            )

    def has_room(tier: Tier, size: int) -> bool:
        if device_is_host:
            return tier == "nvme" or (tier == "host" and used["device"] + used["host"] + size <= host_bytes)
        return tier == "nvme" or used[tier] + size <= budgets[tier]

    def take(size: int, tiers: Sequence[Tier]) -> Tier:
        tier = next(tier for tier in tiers if has_room(tier, size))
        used[tier] += size
        return tier

    param, grad = (fixed[key] if key in fixed else take(kinds[key], TIERS) for key in ("param", "grad"))
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


@dataclass(frozen=True)
class _Needs:
    """What is there before anything is chosen, in bytes.

    Attributes:
        buffers: by tier.
        activation_bytes: on the device.
        kinds: those with a tier of their own: it, and their bytes.
    """

    buffers: Mapping[Tier, int]
    activation_bytes: int
    kinds: Mapping[str, tuple[Tier, int]]

    def inside(self, tiers: Sequence[Tier]) -> dict[str, int]:
        """The bytes of each kind that is there."""
        return {key: nbytes for key, (tier, nbytes) in self.kinds.items() if tier in tiers and nbytes}

    def active_bytes(self, tiers: Sequence[Tier]) -> int:
        """Of activations."""
        return self.activation_bytes if "device" in tiers else 0

    def total(self, tiers: Sequence[Tier]) -> int:
        return sum(self.buffers[tier] for tier in tiers) + self.active_bytes(tiers) + sum(self.inside(tiers).values())

    def text(self, tiers: Sequence[Tier]) -> str:
        """The summands, for a message."""
        words = {"optimizer": "master and moments", "param": "parameters", "grad": "gradients"}
        inside, active_bytes = self.inside(tiers), self.active_bytes(tiers)
        parts = [f"{size_text(sum(self.buffers[tier] for tier in tiers))} of buffers (their smallest number)"]
        parts += [f"{size_text(inside[key])} of {word}" for key, word in words.items() if key in inside]
        parts += [f"{size_text(active_bytes)} of activations"] * bool(active_bytes)
        return " + ".join(parts)


def _ways_out(
    offload: Offload,
    needs: _Needs,
    tiers: Sequence[Tier],
    limit_bytes: int,
    resorts: Sequence[str],
    parameters_sharded: bool,
) -> list[str]:
    """List what helps where a memory, of one tier or of both, is too small, beside smaller activations."""
    inside = needs.inside(tiers)
    raises = [f"raise offload.{tiers[0]}_budget"] * _is_the_limit(offload.budget(tiers[0]), limit_bytes)
    if needs.active_bytes(tiers) > limit_bytes:  # too much without anything else
        return raises
    if tiers == ("host",) and not inside:  # the slots that pages pass through are all there is
        moves = ["set offload.page smaller"] * (offload.page_bytes != BLOCK_BYTES)
    else:
        out = "cpu" if tiers == ("device",) else "nvme"
        leaving = ("optimizer", "grad", "param") if parameters_sharded else ("optimizer", "grad")
        moves = [f"set offload.{key}={out}" for key in leaving if key in inside]
    return [*raises, *moves[:1], *resorts]


def usable_bytes(offload: Offload, free_bytes: int, total_bytes: int) -> int:
    """Of a GPU's free memory, what tensors may take: cuBLAS, NCCL and the gaps between tensors need the rest."""
    auto = GiB + total_bytes // 50
    return max(0, free_bytes - (auto if offload.reserve_bytes is None else offload.reserve_bytes))


def usable_host_bytes(offload: Offload, free_bytes: int, *, device_is_host: bool) -> int:
    """Of a machine's free memory, what tensors may take: see `HOST_SHARE`."""
    return free_bytes if device_is_host or offload.host_budget is not None else int(HOST_SHARE * free_bytes)


def budget_bytes(budget: int | float | None, free_bytes: int) -> int:
    """A budget as a number: bytes, or a share of what is free; never more than is free."""
    if budget is None:
        return free_bytes
    return min(budget if isinstance(budget, int) else int(budget * free_bytes), free_bytes)


def _is_the_limit(given: int | float | None, limit_bytes: int) -> bool:
    """A memory's limit is the budget that was given, and not what is free."""
    return given == limit_bytes if isinstance(given, int) else given is not None and given < 1


def _limit(tier: Tier, given: int | float | None, limit_bytes: int) -> str:
    """How a memory's limit came about."""
    if given is None or (isinstance(given, int) and limit_bytes < given):
        wish = "" if given is None else f", less than offload.{tier}_budget={budget_text(given)}"
        return f"{tier} memory has {size_text(limit_bytes)} free{wish}"
    share = "" if isinstance(given, int) else f", which is {size_text(limit_bytes)}"
    return f"offload.{tier}_budget={budget_text(given)}{share}"


def budget_text(budget: int | float) -> str:
    """A budget as a user may type it."""
    return size_text(budget) if isinstance(budget, int) else _percent(budget)
