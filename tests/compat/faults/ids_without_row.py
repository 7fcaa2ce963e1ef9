"""Ids without a row of the model."""

CANNOT = "each needs an engine: tests/server/test_limits.py has a stand-in of one."
