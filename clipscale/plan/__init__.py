"""Whether a run fits, before it is started: memory and time, without a GPU."""
