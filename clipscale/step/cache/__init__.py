"""The gradient cache: exact gradients of a large batch, chunk by chunk.

This folder is a library of its own: it imports `common/` alone. Models, data and process groups are the
caller's. Some comments name callers in clipscale's own runs. The setting `cache.keep` of these runs is the argument
`keep_bytes` here.
"""
