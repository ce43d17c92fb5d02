"""Memory that a step uses for a while, in fixed numbers: gathered units, borrowed gradients, saved activations."""

from zero.engine.memory.pool import Buffer, Pool, storage_address
from zero.engine.memory.saved_tensors import InPlace, Kept, OnHost
from zero.engine.memory.scratch import Scratch, ScratchPool
from zero.engine.memory.transfer import load, save

__all__ = ["Buffer", "InPlace", "Kept", "OnHost", "Pool", "Scratch", "ScratchPool", "load", "save", "storage_address"]
