"""The gradient cache: exact gradients of a large batch, chunk by chunk.

This folder is a library of its own: it imports `common/` alone, and knows no model, no data and no `World`.
"""
