"""One optimizer step: the gradient cache, chunk sizes, precision, optimizers, moving average."""
