"""The outputs that show the rows of a run: metrics.jsonl, the console, W&B and TensorBoard."""
