"""Memory that a step uses for a while, in fixed numbers: gathered units, borrowed gradients, saved activations."""

from zero.engine.memory.pool import Buffer, Pool, storage_address
from zero.engine.memory.saved_tensors import InPlace, KeptTensor, OnHost
from zero.engine.memory.scratch import Scratch, ScratchPool
from zero.engine.memory.transfer import load_page, save_page

__all__ = [
    "Buffer",
    "InPlace",
    "KeptTensor",
    "OnHost",
    "Pool",
    "Scratch",
    "ScratchPool",
    "load_page",
    "save_page",
    "storage_address",
]
