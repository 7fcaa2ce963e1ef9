"""Processes from their start to their end: a child, the events and the log of an engine."""
