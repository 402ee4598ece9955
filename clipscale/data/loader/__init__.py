"""From shards to batches in host memory, by worker processes, and from there to chunks on the device."""
