"""The published formula of the stages against the published numbers."""

from itertools import pairwise

import pytest

from zero.core.stage import Stage, paper_bytes
from zero.errors import ConfigError


@pytest.mark.parametrize(("level", "gigabytes"), [(0, 112), (1, 49), (2, 38.5), (3, 28)])
def test_seven_billion_parameters_on_four_ranks(level, gigabytes):
    """16P, 4P + 12P/W, 2P + 14P/W and 16P/W bytes."""
    assert paper_bytes(level, numel=7 * 10**9, world_size=4) == gigabytes * 1e9


@pytest.mark.parametrize("level", range(4))
def test_one_rank_has_nothing_to_share(level):
    assert paper_bytes(level, numel=10, world_size=1) == 160


def test_a_stage_shards_what_the_stage_below_does():
    shards = [(Stage(level).moments, Stage(level).gradients, Stage(level).parameters) for level in range(4)]
    assert [sum(each) for each in shards] == [0, 1, 2, 3]
    assert all(low <= high for low, high in pairwise(shards))


@pytest.mark.parametrize("level", [4, -1, True, 2.0, "3"])
def test_other_stages_do_not_exist(level):
    with pytest.raises(ConfigError, match="a stage is 0, 1, 2 or 3"):
        Stage(level)
