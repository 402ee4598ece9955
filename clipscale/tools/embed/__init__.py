"""`clipscale embed`: the features of a whole set, by a run or by any weights."""
