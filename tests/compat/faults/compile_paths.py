"""Paths in the commands of inductor."""

CANNOT = "each try takes a compiler and a folder: tests/compat/test_compile_paths.py has them."
