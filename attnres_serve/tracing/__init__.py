"""Traces: recorded in the workers, edited, read by a lens, and returned as data."""
