"""Tools for data sets: check, stats, index, the demo set."""
