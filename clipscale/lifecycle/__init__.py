"""What spans a run: the lock of its folder, the signals that end it, and what is saved and closed at an early end."""
