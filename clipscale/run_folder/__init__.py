"""The folder of a run: the names of its files, which of its checkpoints is meant, and what is moved aside."""
