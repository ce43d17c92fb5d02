"""The files of a checkpoint: written, published by one rename, listed and read, whatever their tensors mean."""
