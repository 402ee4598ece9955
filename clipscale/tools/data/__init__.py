"""`clipscale data`: pack, select, check, index, and the demo set."""
