"""Clients of traces: over HTTP, in Python and as a command, with figures."""
