"""Tensors under other names: what they may be, and ``--rename`` of ``convert``."""
