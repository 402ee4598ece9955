"""The ranks of a run: the world, FSDP2, sums of gradients."""
