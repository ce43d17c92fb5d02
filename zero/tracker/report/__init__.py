"""Pages about finished and running jobs: `run.write(folder)` for one run, `sweep.write(folder)` for several."""
