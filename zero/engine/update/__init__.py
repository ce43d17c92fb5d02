"""The update: gradients from backward until the optimizer has used them, by pieces that fit in memory."""

from zero.engine.update.gradient import Gradients, PagedGradients
from zero.engine.update.pieces import Piece, run_kernel
from zero.engine.update.update import Updater

__all__ = ["Gradients", "PagedGradients", "Piece", "Updater", "run_kernel"]
