"""The gradient cache: exact gradients of a large batch, chunk by chunk; and the sizes of its chunks.

`GradCache` and all that it imports are a library of its own, which needs no model and no data of clipscale.
"""
