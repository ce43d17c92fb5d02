"""The optimizers, each in a file of its own; a new one needs a line in the table.

The settings of one are a section of `zero.settings.optimizers`, and its option a file of `conf/optim`.
"""

from collections.abc import Mapping

from zero.core.optim import with_moments
from zero.core.optimizers.adagrad import ADAGRAD, adagrad
from zero.core.optimizers.adam import ADAM, ADAMW, adam, adamw
from zero.core.optimizers.ema import with_ema
from zero.core.optimizers.lion import LION, lion
from zero.core.optimizers.muon import MUON, muon
from zero.core.optimizers.rule import Rule
from zero.core.optimizers.sgd import SGD, sgd

OPTIMIZERS: Mapping[str, Rule] = {
    "adamw": ADAMW,
    "adam": ADAM,
    "sgd": SGD,
    "lion": LION,
    "adagrad": ADAGRAD,
    "muon": MUON,
}
"""The optimizers by their names on the command line; the first is the default."""

__all__ = [
    "OPTIMIZERS", "Rule", "adagrad", "adam", "adamw", "lion", "muon", "sgd", "with_ema",
    "with_moments",
]  # fmt: skip
