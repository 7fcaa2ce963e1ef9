"""Measurements of this project; not installed."""
