"""`clipscale explore`: a local page that searches an embedded set with a model, or with two side by side."""
