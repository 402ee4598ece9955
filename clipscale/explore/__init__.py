"""A local page on which a set is searched with a model, or with two side by side."""
