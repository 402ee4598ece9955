"""Records a run while it trains: metrics, the places where they go, tables and warnings. `tools/report` draws the
page."""
