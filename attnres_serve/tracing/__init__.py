"""Traces: recorded in the workers, edited, read by a lens, and answered as data."""
