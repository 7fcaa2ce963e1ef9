"""Weights that are replaced in a running engine."""

CANNOT = "a model is needed that an engine has loaded, with experts that vLLM has packed."
