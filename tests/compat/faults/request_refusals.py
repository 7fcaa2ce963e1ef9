"""Requests that end an engine."""

CANNOT = (
    "each would end the engine that shows it: tests/server/test_limits.py has a stand-in of one."
)
