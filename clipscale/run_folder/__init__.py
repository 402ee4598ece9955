"""The folder of a run: the names of its files, and which of its checkpoints is meant."""
