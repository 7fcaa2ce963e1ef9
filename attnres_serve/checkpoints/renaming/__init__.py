"""Tensors with unknown names: guesses, and ``--rename`` of ``convert``."""
