"""Requests that end an engine."""

CANNOT = "each would end an engine: tests/compat/test_request_refusals.py has a stand-in of one."
