"""The training step: gather, run and release units, reduce gradients, update the offloaded pages."""
