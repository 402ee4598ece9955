"""Metric sinks, tables and plots."""
