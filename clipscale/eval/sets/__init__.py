"""Evaluation sets: what they hold, the layouts they are published in, and their class names and prompts."""
