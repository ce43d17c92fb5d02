"""What is done with a finished run: its report, a sample of text, and checkpoints of other libraries."""
