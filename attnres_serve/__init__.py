"""Serve Attention Residuals models with vLLM."""

__version__ = "0.1.0"
