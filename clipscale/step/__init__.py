"""One optimizer step: encoders and their inputs, loss, precision, optimizers, moving average; `cache/` is a library."""
