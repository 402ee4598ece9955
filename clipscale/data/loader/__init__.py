"""Loads training data: worker processes fill batches in host memory, and chunks of them are copied to the device."""
