"""The sigmoid on a tile: in torch, and in Triton."""
