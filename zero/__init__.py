"""ZeRO for plain PyTorch, as a function."""
