"""The ranks of a run: process groups, DDP, FSDP2, sums of gradients."""
