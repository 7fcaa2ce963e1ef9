"""Beside an AttnRes class in transformers."""
