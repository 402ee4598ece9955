"""Records a run while it trains: metrics, the places where they go, tables and warnings. The page is in tools."""
