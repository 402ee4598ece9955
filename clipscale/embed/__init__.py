"""Features of pictures and texts, computed once and stored."""
