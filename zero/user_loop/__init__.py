"""The engine of a training loop that the user, or another library, has written: `zero.initialize` returns it."""
