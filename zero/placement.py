"""Which page sleeps on which tier.

So far there is one tier, the device, and every page sleeps there: `Offload` accepts nothing else.
"""

from dataclasses import dataclass

from zero.errors import ConfigError

TIERS = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Offload:
    """What leaves the device between uses, and to which tier; "none" keeps it there.

    Raises:
        ConfigError: an unknown tier, or one that is not there yet.
    """

    optimizer: str = "none"
    param: str = "none"
    grad: str = "none"

    def __post_init__(self) -> None:
        for key in ("optimizer", "param", "grad"):
            tier = getattr(self, key)
            if tier not in TIERS:
                raise ConfigError(f"offload.{key}={tier}: a tier is one of {', '.join(TIERS)}")
            if tier != "none":
                raise ConfigError(f"offload.{key}={tier} comes with the state store; use offload=none")
