"""The sigmoid objective on a tile of scores: in torch, and in Triton."""
