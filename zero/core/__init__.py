"""Arithmetic of stages, layouts, dtypes, optimizers and settings, without ranks, files or clocks."""
