"""Pages to look at: `run.write(folder)` for one run, `sweep.write(folder)` for several."""
