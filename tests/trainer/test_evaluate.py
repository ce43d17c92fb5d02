"""Validation is one number, however many ranks compute it."""

import pytest

from zero.testing import run_ranks
from zero.trainer.data import open_data
from zero.trainer.data.source import SyntheticConfig
from zero.trainer.run.evaluate import CHUNK_TOKENS, validation_loss

SEQ = 700  # two rows to a chunk


@pytest.mark.parametrize("rows", [1, 7])
def test_every_world_evaluates_the_same_chunks(rows):
    data = open_data(SyntheticConfig(), SEQ, 0)
    expected = data.validation(0, rows).double().mean()

    def rank(world):
        seen = []

        def loss(chunk):
            seen.append((len(chunk), int(chunk.sum())))
            return chunk.double().mean()

        return validation_loss(loss, data, world, rows=rows), seen

    chunks = []
    for size in (1, 2, 3):
        answers = run_ranks(size, rank)
        assert len({len(seen) for _, seen in answers}) == 1, "a rank ran the model more often than another"
        assert all(value == pytest.approx(float(expected), rel=1e-12) for value, _ in answers)
        chunks.append({chunk for _, seen in answers for chunk in seen})
    assert chunks[0] == chunks[1] == chunks[2]
    assert all(count * SEQ <= CHUNK_TOKENS for count, _ in chunks[0])


def test_more_rows_than_there_are_means_all_of_them_once():
    """Rows that are counted twice would weigh twice."""
    data, counted = open_data(SyntheticConfig(), SEQ, 0), []

    def loss(chunk):
        counted.append(len(chunk))
        return chunk.double().mean()

    def rank(world):
        return validation_loss(loss, data, world, rows=data.validation_rows + 3)

    (value,) = run_ranks(1, rank)
    assert sum(counted) == data.validation_rows
    assert value == pytest.approx(float(data.validation(0, data.validation_rows).double().mean()), rel=1e-12)
