"""Starts a run's workers on this machine, and checks the variables of torchrun and Slurm."""
