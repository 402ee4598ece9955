"""What surrounds a run: the lock of its folder, the signals that end it, and its early end."""
