"""A training state on disk: one folder a step, one safetensors file a rank, a manifest that vouches for each byte."""
