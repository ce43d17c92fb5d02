"""Write the report of a run, or of a sweep and its jobs, and print the paths of the files.

scripts/report runs/2026-01-31/12-00-00-000000        a run: report.html
scripts/report runs/2026-01-31/12-30-00-000000        a sweep: report.html for each job, sweep.csv and sweep.html
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from zero.trainer.text_output import command_line


def main(words: Sequence[str]) -> int:
    parser = command_line("report", __doc__)
    parser.add_argument("folder", type=Path, help="folder of a run or of a sweep")
    folder = parser.parse_args(words).folder
    if not folder.is_dir():
        print(f"{folder} is not a folder. Give the folder of a run, such as runs/DATE/TIME.", file=sys.stderr)
        return 2
    from zero.tracker.report import run, sweep
    from zero.tracker.report.jobs import jobs_in
    from zero.trainer.config import defaults_for

    jobs = jobs_in(folder)
    for run_folder in jobs or [folder]:
        print(run.write_run(run_folder, defaults_for))
    if jobs:
        print(sweep.write_sweep(folder).page)
    return 0
