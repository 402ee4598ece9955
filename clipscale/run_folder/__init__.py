"""The folder of a run: its paths and records, which checkpoint is meant, what is set aside, and what is deleted."""
