"""The distillation: its objective, and its functions on a tile of scores in torch."""
