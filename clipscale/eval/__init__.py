"""Evaluates a model: zero-shot classification, retrieval, and a captioner's captions."""
