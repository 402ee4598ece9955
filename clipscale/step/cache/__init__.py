"""The gradient cache: exact gradients of a large batch, chunk by chunk. And the sizes of its chunks.

What `GradCache` loads is a library of its own, which needs no model and no data of clipscale.
"""
