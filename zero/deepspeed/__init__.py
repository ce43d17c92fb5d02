"""DeepSpeed's interface: `zero.initialize` for a model and a loop of the user's own, and the names that scripts use."""
