"""Tokens of a request."""

CANNOT = "nothing is wrong: vLLM counts no tokens for an access line."
