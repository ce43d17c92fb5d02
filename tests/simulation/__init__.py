"""A simulated GPU, which finds missing waits between streams on a CPU, and a clock of what would take how long."""

from tests.simulation.races import RaceError
from tests.simulation.simulated_gpu import simulated_gpu

__all__ = ["RaceError", "simulated_gpu"]
