"""Streaming image-text shards into host batches."""
