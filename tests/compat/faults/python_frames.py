"""Frames of CPython; tests/compat/test_python_frames.py counts page faults."""

CANNOT = "CPython maps memory at a depth that all frames of a running engine decide."
