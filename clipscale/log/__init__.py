"""What a run records while it trains: its metrics, where they go, tables and warnings. The page is in tools."""
