"""Lets a run survive or explain faults of its machine: full disks, closed outputs, limits, and damaged records."""
