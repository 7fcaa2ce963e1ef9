"""Checkpoints on disk and on the hub: what they hold, and whether it can be served."""
