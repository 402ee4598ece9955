"""The command line: from words to settings to the work of a verb; help, sweeps, and the plan of a start."""
