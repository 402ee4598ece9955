"""The folder of a run: names of its files, which checkpoint is meant, what is moved aside, and what is deleted."""
