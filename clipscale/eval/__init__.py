"""Zero-shot classification and retrieval."""
