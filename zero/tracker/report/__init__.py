"""Pages about finished and running jobs: `run.write_run(folder)` for one run, `sweep.write_sweep(folder)` for several.

A page is made from the files of run folders alone, so nothing here imports the engine or needs the run.
"""
