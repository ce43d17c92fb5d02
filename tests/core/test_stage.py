"""A stage is three booleans, each stage shards what the one below does, and there are four."""

from itertools import pairwise

import pytest

from zero.core.stage import Stage
from zero.errors import ConfigError


def test_a_stage_shards_what_the_stage_below_does():
    shards = [(Stage(level).moments, Stage(level).gradients, Stage(level).parameters) for level in range(4)]
    assert [sum(each) for each in shards] == [0, 1, 2, 3]
    assert all(low <= high for low, high in pairwise(shards))


@pytest.mark.parametrize("level", [4, -1, True, 2.0, "3"])
def test_other_stages_do_not_exist(level):
    with pytest.raises(ConfigError, match="a stage is 0, 1, 2 or 3"):
        Stage(level)
