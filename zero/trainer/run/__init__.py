"""One rank's part of a run: its task, its start, the work between steps, and its saves."""
