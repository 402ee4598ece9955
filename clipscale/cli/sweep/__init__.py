"""Sweeps, `clipscale train -m ...`. In the order of work, a file each:

run_sweep.py     a sweep from its command line to its last lines
plugins.py       words of Hydra's own settings -> its launcher and its sweeper, if the command line names any
jobs.py          the other words -> the runs, their settings and folders
by_hydra.py      gives the runs to the launcher and the sweeper
job_folder.py    files by which the jobs of a launcher know of each other: locks, failures, the end by a signal
"""
