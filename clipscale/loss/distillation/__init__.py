"""Distillation: its objective, and the objective on a tile in torch."""
