"""The update: gradients from backward until the optimizer has used them, by pieces that fit in memory."""

from zero.engine.update.gradient import Gradients, PagedGradients
from zero.engine.update.update import Piece, Updater, run_kernel

__all__ = ["Gradients", "PagedGradients", "Piece", "Updater", "run_kernel"]
