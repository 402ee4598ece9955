"""The gradient cache, a library of its own: exact gradients of a large batch, chunk by chunk."""
