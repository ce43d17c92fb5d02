"""The parts of `scripts/gpu`: a file for each part, the devices, the runner of tasks, and the page."""
