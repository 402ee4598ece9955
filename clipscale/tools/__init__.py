"""Tools that work on runs, weights and shards. The trainer imports none of them."""
