"""DeepSpeed's optimizers by the names of their modules."""

from zero.deepspeed.ops import adagrad as adagrad, adam as adam, lion as lion, muon as muon
