"""A run's metrics, tables, plots and report page."""
