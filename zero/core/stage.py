"""A ZeRO stage as three booleans: whether moments, gradients and parameters are sharded.

Stage 0 shards nothing. Every rank keeps everything; gradients are all-reduced once per step, as in plain data
parallelism.

Stage 1 shards the moments and the fp32 master. A rank updates only its own range, so it needs only its own range of the
gradient: the all-reduce becomes a reduce-scatter. The other ranges of the new parameters arrive with the next gather,
which overlaps with the next forward.

Stage 2 also shards the gradients: each microbatch's gradients are reduce-scattered as soon as they exist, so that only
one shard is accumulated over microbatches.

Stage 3 also shards the parameters: a unit is gathered just before its forward, released after it, and gathered again
for its backward.

No other file knows the four numbers; all others read the booleans.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from dataclasses import dataclass

from zero.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """The parts of the training state that are sharded over the ranks.

    Args:
        level: 0 nothing, 1 moments and fp32 master, 2 gradients too, 3 parameters too.

    Raises:
        ConfigError: `level` is not one of 0, 1, 2, 3.
    """

    level: int = 3

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in range(4):
            raise ConfigError(f"zero.stage={self.level!r}: a stage is 0, 1, 2 or 3")

    @property
    def moments(self) -> bool:
        """Return whether the moments and the fp32 master are sharded."""
        return self.level >= 1

    @property
    def gradients(self) -> bool:
        """Return whether accumulated gradients are sharded, so that they are reduce-scattered in every microbatch."""
        return self.level >= 2

    @property
    def parameters(self) -> bool:
        """Return whether parameters are sharded between uses, so that they are gathered just in time and released."""
        return self.level >= 3
