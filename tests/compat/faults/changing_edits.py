"""Versions of weights that say how often edits changed."""

CANNOT = "nothing is wrong: vLLM knows no edits that a version could say."
