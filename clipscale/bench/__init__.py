"""Benchmarks, against peers where these are installed; each is a sub-verb of `clipscale bench`."""
