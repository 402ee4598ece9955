"""Gradients of several ranks: towers under FSDP2, and sums that go on during the backward pass."""
