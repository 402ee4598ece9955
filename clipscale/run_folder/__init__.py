"""The folder of a run: its paths and records, the choice of a checkpoint, and what is set aside or deleted."""
