"""Shards, on this machine or on servers: lists, indexes, counts, reads and writes them."""
