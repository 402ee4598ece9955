"""`clipscale eval`: evaluates a run's checkpoints, or any weights."""
