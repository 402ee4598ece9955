"""The softmax on a tile: in torch, and in Triton."""
