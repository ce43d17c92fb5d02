"""One seed and one thread for every test, both printed, so that a failure can be run again as it was."""

import os

import pytest
import torch

pytest.register_assert_rewrite("zero.testing")

SEED = int(os.environ.get("ZERO_TEST_SEED", "0"))


def pytest_report_header() -> str:
    return f"ZERO_TEST_SEED={SEED}, one thread of torch per rank"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # thread ranks share the cores already
    yield
    torch.set_num_threads(before)
