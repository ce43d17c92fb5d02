"""Traces of a microbatch on meta tensors: the bytes of its activations, and its work."""
