"""`clipscale explore`: a local page that searches an embedded set with a model."""
