"""Ids without a row of the model."""

CANNOT = "each needs an engine: tests/compat/test_request_refusals.py has a stand-in of one."
