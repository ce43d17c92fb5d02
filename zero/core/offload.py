"""The settings of `offload`: a tier, or `auto`, for each kind of state, and how pages move between tiers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from zero.core.schema import Section
from zero.core.setting_types import PathOrPaths, bytes_of, key, memory_bytes, or_auto, whole_or_auto
from zero.core.sizes import BLOCK_BYTES, GiB, size_text
from zero.errors import ConfigError, SettingError

IF_SHARDED = "cpu_if_sharded"
"""The setting of parameters in presets: cpu at the stage that shards parameters, else none."""

PRESETS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "none": ("none", "none", "none"),
        "cpu": ("cpu", IF_SHARDED, "cpu"),
        "nvme": ("nvme", IF_SHARDED, "cpu"),
        "infinity": ("nvme", "nvme", "nvme"),
        "auto": ("auto", "auto", "auto"),
    }
)
"""Name of a preset -> its settings of (optimizer, param, grad)."""

# Types of settings. auto becomes None.


def _page(value: object) -> int:
    nbytes = bytes_of(value)
    if not BLOCK_BYTES <= nbytes <= GiB or nbytes % BLOCK_BYTES:
        raise ValueError("must be a positive multiple of 4KiB, at most 1GiB")
    return nbytes


def _pressure(value: object) -> int | str:
    return "off" if value in ("off", False) else bytes_of(value) and memory_bytes(value)


def _budget(value: object) -> int | float:
    if isinstance(value, str) and (percent := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", value)):
        value = float(percent[1]) / 100
    if isinstance(value, float):
        if 0 < value <= 1:
            return value
        raise ValueError
    return bytes_of(value) and memory_bytes(value)


def _share(value: object) -> str | float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    words: dict[str | float, str] = {0: "device", 1: "host", "device": "device", "host": "host"}
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value not in words:
        raise ValueError
    return words[value]


def _percent(share: float) -> str:
    return f"{share:.9%}".rstrip("0%").rstrip(".") + "%"


_SIZE_OR_SHARE = "a size such as 8GiB, a share of what is free such as 50%"
PageBytes = Annotated[int | None, or_auto("a size in bytes such as 8MiB or 80GiB, not negative", _page, None)]
Budget = Annotated[
    int | float | None,
    or_auto(_SIZE_OR_SHARE, _budget, None, lambda kept: _percent(kept) if isinstance(kept, float) else kept),
]
Reserve = Annotated[int | None, or_auto("a size such as 80GiB", memory_bytes, None)]
Compute = Annotated[
    Literal["device", "host", "auto"] | float, or_auto("device, host, a share such as 0.4", _share, "auto")
]
StoreThreads = Annotated[int | None, whole_or_auto(1, 4096, None)]
PressureBytes = Annotated[int | Literal["auto", "off"], or_auto("off, a size such as 2GiB", _pressure, "auto")]
AheadBytes = Annotated[
    int | None, or_auto("a size such as 8GiB", lambda size: bytes_of(size) and memory_bytes(size), None)
]


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
    path: PathOrPaths | None = key(
        None,
        "folder of the file, which has no name; a list of folders: pages are spread over a file in each, by their "
        "measured rates; null: the current folder. '$NAME', in quotes, is a variable of each rank",
        trades="several disks read and write at once; one that fails ends the run",
        example=". offload=nvme",
    )
    page_bytes: PageBytes = key(
        "auto",
        "bytes of one fp32 page, such as 4MiB; a multiple of 4KiB; auto: 4MiB, for large models up to 64MiB",
        alias="page",
        unit="bytes",
        trades="host memory against speed: the arena holds a few pages per thread, disks like large ones",
        example="8MiB",
    )
    threads: StoreThreads = key(
        "auto",
        "threads that read, update and write pages, on all disks together; auto: 4 for each folder of offload.path",
        unit="threads",
        example="4",
    )
    ahead: AheadBytes = key(
        "auto",
        "most state that is read before its gradient exists, on a GPU and in host memory each, such as 8GiB; auto: "
        "what the plan leaves free on a GPU if it counts activations; for a disk an eighth of host memory beside a "
        "GPU, else two pages of each kind",
        unit="bytes",
        trades="free memory against waiting for PCIe or a disk",
        example="8GiB",
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
    pressure: PressureBytes = key(
        "auto",
        "free memory below which pages of state that is auto move one tier down, and come back later: a size such as "
        "2GiB; auto: half of offload.reserve, and a fiftieth of host memory; off",
        unit="bytes",
        trades="tens of microseconds at each step against running out of memory",
        example="off",
    )
    verify: bool = key(
        True,
        "check length and CRC-32 of each page that is read from a file",
        trades="about a hundredth of a step against pages that a disk changed in silence",
        example="false",
    )
    pin: bool = key(
        True,
        "lock host buffers for the GPU's copy engines",
        trades="memory that the system cannot take back against copies that run beside compute",
        example="false",
    )
    compute: Compute = key(
        "device",
        "processor that updates offloaded state beside a GPU: device, host, the share of each unit's pages that it "
        "updates, such as 0.4, or auto (the fastest share, as a plan predicts it; the device in a loop of your own)",
        trades="host moves gradients and parameters only, and computes on the slower processor",
        example="auto",
    )

    def __init__(self, preset: str = "none", **settings: Any) -> None:
        """Check the settings: `Offload("nvme", path="/mnt/nvme", threads=4)`.

        Args:
            preset: "none", "cpu", "nvme", "infinity" or "auto": defaults for `optimizer`, `param` and `grad`.
            **settings: fields of this class; None is the default. A budget is a number of bytes (int) or a share of the
                free memory (float).

        Raises:
            SettingError: an unknown word, a page size that is not a multiple of 4 KiB, or a number that is too small.
        """
        if not isinstance(preset, str) or preset not in PRESETS:
            example = "" if isinstance(preset, str) else ', or zero.Offload(optimizer="cpu")'
            raise SettingError(f"offload={preset}: must be one of {', '.join(PRESETS)}{example}")
        values = dict(zip(("optimizer", "param", "grad"), PRESETS[preset], strict=True))
        values |= {name: value for name, value in settings.items() if value is not None}
        for name in ("device_budget", "host_budget", "reserve_bytes", "ahead", "pressure"):
            if type(values.get(name)) is int and values[name] >= 0:
                values[name] = f"{values[name]}B"  # exact here; on a command line a bare 80 means 80GiB
        super().__init__(**values)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the folders for files of pages, one or more; $NAME in them is not expanded yet."""
        return (self.path or ".",) if self.path is None or isinstance(self.path, str) else self.path

    @property
    def host_share(self) -> float:
        """The share of each unit's offloaded groups of pages that the host updates beside a GPU."""
        return self.compute if isinstance(self.compute, float) else float(self.compute == "host")

    @property
    def kinds(self) -> tuple[str, str, str]:
        """Return the settings of (optimizer, param, grad)."""
        return self.optimizer, self.param, self.grad

    def budget(self, memory: str) -> int | float | None:
        """Return the setting of the budget of a memory: "device" or "host"."""
        return self.device_budget if memory == "device" else self.host_budget

    def at(self, *, parameters_sharded: bool) -> Offload:
        """Return the settings at a stage, in which `param` is none, cpu, nvme or auto.

        If parameters are not sharded, `param` is none.

        Raises:
            ConfigError: parameters are offloaded at a stage that does not shard them.
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


def budget_text(budget: int | float) -> str:
    """Return a budget as a user types it: a size or a percentage."""
    return size_text(budget) if isinstance(budget, int) else _percent(budget)
