"""A run: its loop and its records, the lock of its folder, the signals that end it, and its early end."""
